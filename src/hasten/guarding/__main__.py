"""Proofs in a process of their own: ``python -m hasten.guarding RECIPE FOLDER ORDERS ANSWERS``.

RECIPE is a resolved recipe whose data lies ready, FOLDER takes what proofs write, ORDERS is a file
with a JSON list; a line of JSON in ANSWERS follows each order as soon as it is obeyed, so that a
process that is killed has answered what it had done:

    {"do": "reference", "plan"}                           ->  {"loss", "records", "tokens", ...}
    {"do": "gradient", "plan", "cut", "padded"}           ->  {"error", "worst", "name", ...}
    {"do": "leak", "plan"}                                ->  {"change", "documents", ...}
    {"do": "update", "without", "plan"}                   ->  {"error", "floor", "steps"}
    {"do": "losses", "plan", "steps"}                     ->  {"losses": [hex], "acted": [...]}
    {"do": "train", "plan", "seed", "tokens"}             ->  {"held_out_loss", "tokens", "steps"}
    any of them that can't be obeyed                      ->  {"failed": why}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hasten.guarding.material import Bench
from hasten.guarding.orders import obey


def main(recipe: Path, folder: Path, orders: Path, answers: Path) -> None:
    """Obey every order in turn."""
    bench = opened(recipe, folder)
    with answers.open("a", buffering=1) as outbox:
        for order in json.loads(orders.read_text()):
            outbox.write(json.dumps(obey(bench, order)) + "\n")


def opened(path: Path, folder: Path) -> Bench:
    """A recipe's job, to be built for any plan."""
    from hasten.core.job import Job
    from hasten.core.plan import Plan
    from hasten.recipe.build import facts_of, job_of, plan_of
    from hasten.recipe.material import gather
    from hasten.recipe.schema import load_recipe

    recipe = load_recipe(path)
    material = gather(recipe, Path(recipe.output) / "data")
    known = facts_of(recipe, material)

    def job(plan: Plan, seed: int | None, tokens: int | None) -> Job:
        changes: dict[str, Any] = {} if seed is None else {"seed": seed}
        if tokens is not None:
            changes |= {"max_tokens": tokens, "max_steps": None, "epochs": None}
        return job_of(recipe.model_copy(update=changes), material, known, plan)

    def read(stored: list[Any]) -> Plan:
        return plan_of(recipe.model_copy(update={"plan": stored}), known)

    folder.mkdir(parents=True, exist_ok=True)
    return Bench(job, read, known, folder)


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:5]))
