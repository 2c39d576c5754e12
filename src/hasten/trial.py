"""One arm of an experiment in a process of its own: ``python -m hasten.trial RECIPE PLAN IN OUT``.

RECIPE is a resolved recipe whose data lies ready, PLAN a plan as JSON; IN and OUT are file
descriptors of pipes that carry one JSON object per line. The process builds the arm once and then
answers orders, asleep in between, so that arms can take turns on one machine:

    {"do": "steps", "count": 4}  ->  {"steps": [{step, loss, tokens, seconds, ...}, ...],
                                      "compiled": {"graphs": ..., "seconds": ...}}
    {"do": "evaluate"}           ->  {"held_out_loss": ..., "tokens": ...}
    {"do": "finish"}             ->  {"acted": [...], "samples": [...], "ledger": {...}}
                                      and the process ends

``graphs`` counts what torch.compile has compiled so far, ``seconds`` what this order's share took.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.core.technique import Technique

STARTED = time.perf_counter()


def main(
    recipe_path: str,
    plan: str,
    orders: int,
    answers: int,
    more: Iterable[type[Technique]] = (),
) -> int:
    """Build the arm, then do as told until the orders end.

    ``more`` are techniques beside the catalogue's, for an entry of one's own.
    """
    with os.fdopen(orders, "r") as inbox, os.fdopen(answers, "w", buffering=1) as outbox:
        try:
            arm = Arm(Path(recipe_path), json.loads(plan), more)
            _say(outbox, {"ready": True, "startup_seconds": arm.session.startup_seconds})
            for line in inbox:
                order = json.loads(line)
                _say(outbox, arm.obey(order))
                if order["do"] == "finish":
                    break
        except Exception as error:  # the controller reports the arm as failed, with the reason
            _say(outbox, {"failed": f"{type(error).__name__}: {error}"})
            return 1
    return 0


class Arm:
    """A session that trains in pieces."""

    def __init__(
        self, recipe_path: Path, plan: list[Any], more: Iterable[type[Technique]] = ()
    ) -> None:
        from hasten.core import facts
        from hasten.core.clock import clock_on
        from hasten.core.session import assemble
        from hasten.core.setup import prepare
        from hasten.core.step import training
        from hasten.recipe.build import facts_of, job_of, plan_of
        from hasten.recipe.ceiling import meter_of
        from hasten.recipe.material import gather
        from hasten.recipe.schema import load_recipe

        imported = time.perf_counter()
        recipe = load_recipe(recipe_path).model_copy(update={"plan": plan})
        folder = Path(recipe.output)
        self.material = gather(recipe, folder / "data")
        known = facts_of(recipe, self.material)
        facts.reset_memory_peak(known.device)
        opened = time.perf_counter()
        self.plan = plan_of(recipe, known, more=more)
        job = job_of(recipe, self.material, known, self.plan)
        place = folder / f"arm-{self.plan.key}"
        self.session = assemble(prepare(job, self.plan, known, place))
        self.session.meter = meter_of(recipe, known, self.session.model)
        self.session.startup_seconds |= {"imports": imported - STARTED, "data": opened - imported}
        self.session.setup.clock = clock_on(known.device)
        self._training: Iterator[Any] = training(self.session)
        self._compiling = compiled()[1]

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to one order."""
        from hasten.core.evaluate import evaluate

        if order["do"] == "steps":
            found = list(itertools.islice(self._training, order["count"]))
            if len(found) < order["count"]:
                raise RuntimeError(f"training ended {order['count'] - len(found)} steps too early")
            self.session.setup.checkpoint.settle()  # others' turns come now
            graphs, seconds = compiled()
            before, self._compiling = self._compiling, seconds
            took = {"graphs": graphs, "seconds": seconds - before}
            return {"steps": [m.to_dict() for m in found], "compiled": took}
        if order["do"] == "evaluate":
            return evaluate(self.session).to_dict()
        if order["do"] == "finish":
            return self._finish()
        raise ValueError(f"unknown order {order['do']!r}")

    def _finish(self) -> dict[str, Any]:
        from dataclasses import asdict

        from hasten.evidence.ledger import ledger_of
        from hasten.sample import write_samples

        proofs = [(t.name(), t.probe(self.session)) for t in self.plan]
        ledger = ledger_of(self.session)
        self.session.finish()
        samples = write_samples(self.session, self.material.tokenizer, self.material.held_out)
        return {
            "acted": [{"technique": name, **asdict(proof)} for name, proof in proofs],
            "samples": [asdict(s) for s in samples],
            "ledger": ledger,
        }


def compiled() -> tuple[int, float]:
    """Graphs that torch.compile made in this process so far, and the seconds it took for them."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled if nobody imported it
    if dynamo is None:
        return 0, 0.0
    spent = dynamo.calculate_time_spent()  # forward and backward graphs, by torch's own clock
    graphs = dynamo.counters["stats"]["unique_graphs"]
    return int(graphs), float(spent.get("total_wall_time", 0.0))


def _say(outbox: Any, answer: dict[str, Any]) -> None:
    outbox.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    from hasten.core.processes import end_with_parent

    end_with_parent()
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
