"""Proofs in a process of their own, which answers orders.

    python -m hasten.measure.quality RECIPE FOLDER ORDERS ANSWERS

RECIPE is a resolved recipe whose data lies ready, FOLDER takes what proofs write; ORDERS and
ANSWERS are file descriptors of pipes that carry one JSON object per line. First it says that it is
ready; then an answer follows each order:

    {"do": "reference", "plan"}                           ->  {"loss", "records", "tokens", ...}
    {"do": "gradient", "plan", "cut", "padded", "step"}   ->  {"error", "worst", "name", ...}
    {"do": "leak", "plan"}                                ->  {"change", "documents", ...}
    {"do": "update", "without", "plan"}                   ->  {"error", "floor", "steps"}
    {"do": "losses", "plan", "steps"}                     ->  {"losses": [hex], "acted": [...]}
    {"do": "train", "plan", "seed", "tokens"}             ->  {"held_out_loss", "tokens", "steps"}
    any of them that can't be obeyed                      ->  {"refused": why}

Started with a rank's variables it meets the others, and all are given the same orders. There only
what all find out alike is refused; after any other error, ``{"failed": why}``, nobody knows where
the other ranks are, and the processes are of no more use.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from hasten.machine import environment
from hasten.measure.quality.bench import CheckContext
from hasten.measure.quality.orders import obey


def main(recipe_path: Path, folder: Path, orders: int, answers: int) -> int:
    """Obey every order in turn."""
    from hasten.measure.serving import failure, served
    from hasten.recipe.build import facts_of
    from hasten.recipe.schema import load_recipe

    world = environment.world()
    with os.fdopen(orders, "r") as inbox, os.fdopen(answers, "w", buffering=1) as outbox:

        def say(answer: dict[str, Any]) -> None:
            outbox.write(json.dumps(answer) + "\n")

        def serve() -> None:
            bench = opened(recipe_path, folder)
            say({"ready": True})
            for line in inbox:
                say(obey(bench, json.loads(line), alone=world.size == 1))

        try:
            recipe = load_recipe(recipe_path)
        except Exception as error:
            say(failure(error))
            return 1
        meeting = datetime.timedelta(seconds=recipe.link_seconds), recipe.backend
        return served(world, lambda: facts_of(recipe).device, meeting, serve, say)


def opened(path: Path, folder: Path) -> CheckContext:
    """A recipe's job, to be built for any plan."""
    from hasten.core.job import Job
    from hasten.core.plan import Plan
    from hasten.recipe.build import facts_of, job_of, plan_of
    from hasten.recipe.prepared_data import gather
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
    return CheckContext(job, read, known, folder, recipe.nproc)


if __name__ == "__main__":
    from hasten.machine.processes import end_with_parent

    end_with_parent()
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
