"""One training with other hyper-parameters, as a process of its own.

    python -m hasten.tune.training CHANGES RECIPE PLAN IN OUT

It speaks as ``hasten.measure.trial_process`` does, and knows two orders: ``steps`` and
``evaluate``. CHANGES are keys of the recipe as JSON, a seed among them. They hold for weights,
order and optimizer; the data and the split between training and held-out records stay those of
RECIPE, so that the losses of all trainings are of the same records.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hasten.core.loop import evaluate
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.machine import host
from hasten.machine.processes import end_with_parent
from hasten.measure.serving import own_folder
from hasten.recipe.build import facts_of, job_of, plan_of
from hasten.recipe.prepared_data import gather
from hasten.recipe.schema import Recipe, load_recipe


def main(changes: str, recipe: str, plan: str, orders: int, answers: int) -> int:
    """Build the training, then do as told until the orders end."""
    with os.fdopen(orders, "r") as inbox, os.fdopen(answers, "w", buffering=1) as outbox:
        try:
            wanted = load_recipe(Path(recipe)).model_copy(update={"plan": json.loads(plan)})
            with own_folder(Path(wanted.output)) as place:
                session = _session(json.loads(changes), wanted, place)
                steps = training(session)
                _say(outbox, {"ready": True, "startup_seconds": session.startup_seconds})
                for line in inbox:
                    _say(outbox, _obey(session, steps, json.loads(line)))
        except Exception as error:  # whoever gave the orders reports it, with the reason
            _say(outbox, {"failed": f"{type(error).__name__}: {error}"})
            return 1
    return 0


def _session(changes: Mapping[str, Any], recipe: Recipe, place: Path) -> Session:
    material = gather(recipe, Path(recipe.output) / "data")
    known = facts_of(recipe, material)
    host.reset_memory_peak(known.device)
    chosen = plan_of(recipe, known)
    job = job_of(recipe.model_copy(update=dict(changes)), material, known, chosen)
    return assemble(prepare(job, chosen, known, place))


def _obey(session: Session, steps: Iterator[Any], order: Mapping[str, Any]) -> dict[str, Any]:
    if order["do"] == "steps":
        found = list(itertools.islice(steps, order["count"]))
        session.setup.checkpoint.settle()  # others' turns come now
        if len(found) < order["count"]:
            raise RuntimeError(f"training ended {order['count'] - len(found)} steps too early")
        return {"steps": [m.to_dict() for m in found]}
    if order["do"] == "evaluate":
        return evaluate(session).to_dict()
    raise ValueError(f"unknown order {order['do']!r}")


def _say(outbox: Any, answer: Mapping[str, Any]) -> None:
    outbox.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
