"""One arm of an experiment in a process of its own, which answers orders.

    python -m hasten.measure.trial_process RECIPE PLAN IN OUT

RECIPE is a resolved recipe whose data lies ready, PLAN a plan as JSON; IN and OUT are file
descriptors of pipes that carry one JSON object per line. The process builds the arm once and then
answers orders, asleep in between, so that arms can take turns on one machine:

    {"do": "steps", "count": 4}  ->  {"steps": [{step, loss, tokens, seconds, ...}, ...],
                                      "compiled": {"graphs": ..., "seconds": ...}, "apart": false}
    {"do": "evaluate"}           ->  {"held_out_loss": ..., "tokens": ...}
    {"do": "finish"}             ->  {"acted": [...], "samples": [...], "ledger": {...}}
                                      and the process ends

An order of steps may say ``"again": true``: they begin with the first record of the data, so that
arms can be compared on the same ones. ``graphs`` counts what torch.compile has compiled so far,
``seconds`` what this order's share took.
An arm on several ranks is such a process for each: started with a rank's variables, they meet, and
all are given the same orders. ``apart`` says that their steps don't wait for each other.

``python -m hasten.measure.trial_process RECIPE SOCKET`` is such a process once it is told a plan:
it imports what they need and forks one for each that comes through the socket
(`hasten.measure.nursery`).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.machine import environment, host

if TYPE_CHECKING:
    from hasten.core.technique import Technique
    from hasten.recipe.sample import Sample
    from hasten.recipe.schema import Recipe

STARTED = time.perf_counter()
More = Iterable[type["Technique"]]


def main(recipe_path: str, plan: str, orders: int, answers: int, more: More = ()) -> int:
    """Build the arm, then do as told until the orders end.

    ``more`` are techniques beside the catalogue's, for an entry of one's own.
    """
    from hasten.measure.serving import failure, served
    from hasten.recipe.build import facts_of
    from hasten.recipe.schema import load_recipe

    with os.fdopen(orders, "r") as inbox, os.fdopen(answers, "w", buffering=1) as outbox:

        def say(answer: dict[str, Any]) -> None:
            outbox.write(json.dumps(answer) + "\n")

        try:
            recipe = load_recipe(Path(recipe_path))
        except Exception as error:  # the controller reports the arm as failed, with the reason
            say(failure(error))
            return 1
        recipe = recipe.model_copy(update={"plan": json.loads(plan)})
        meeting = datetime.timedelta(seconds=recipe.link_seconds), recipe.backend
        return served(
            environment.world(),
            lambda: facts_of(recipe).device,
            meeting,
            lambda: _serve(recipe, more, inbox, say),
            say,
        )


def _serve(recipe: Recipe, more: More, inbox: Any, say: Callable[[dict[str, Any]], None]) -> None:
    from hasten.measure.serving import own_folder

    with own_folder(Path(recipe.output)) as place:
        arm = RecipeJob(recipe, place, more)
        say({"ready": True, "startup_seconds": arm.session.startup_seconds})
        for line in inbox:
            order = json.loads(line)
            say(arm.obey(order))
            if order["do"] == "finish":
                return


class RecipeJob:
    """A session that trains in pieces; what its plan writes goes to ``place``."""

    def __init__(self, recipe: Recipe, place: Path, more: More = ()) -> None:
        from hasten.core.session import assemble
        from hasten.core.setup import prepare
        from hasten.core.step import training
        from hasten.core.timing import clock_on
        from hasten.recipe.build import facts_of, job_of, plan_of, requested_plan
        from hasten.recipe.peak_flops import meter_of
        from hasten.recipe.prepared_data import gather

        imported = time.perf_counter()
        self.material = gather(recipe, Path(recipe.output) / "data")
        known = facts_of(recipe, self.material)
        host.reset_memory_peak(known.device)
        opened = time.perf_counter()
        self.plan = plan_of(recipe, known, more=more)
        asked = requested_plan(recipe, more)
        self._switches = [t for t in self.plan if t in asked.techniques]  # less the ranks' layout
        job = job_of(recipe, self.material, known, self.plan)
        self.session = assemble(prepare(job, self.plan, known, place))
        self.session.meter = meter_of(recipe, known, self.session.model)
        self.session.startup_seconds |= {"imports": imported - STARTED, "data": opened - imported}
        self.session.setup.clock = clock_on(known.device)
        self._training: Iterator[Any] = training(self.session)
        self._compiling = compiled()[1]

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """The answer to one order; all ranks are given the same."""
        from hasten.core.loop import evaluate

        if order["do"] == "steps":
            if order.get("again"):
                progress = self.session.progress
                progress.epoch, progress.step_in_epoch = 0, 0
            found = list(itertools.islice(self._training, order["count"]))
            if len(found) < order["count"]:
                raise RuntimeError(f"training ended {order['count'] - len(found)} steps too early")
            self.session.setup.checkpoint.settle()  # others' turns come now
            graphs, seconds = compiled()
            before, self._compiling = self._compiling, seconds
            took = {"graphs": graphs, "seconds": seconds - before}
            apart = self.session.setup.agreement.apart
            return {"steps": [m.to_dict() for m in found], "compiled": took, "apart": apart}
        if order["do"] == "evaluate":
            return evaluate(self.session).to_dict()
        if order["do"] == "finish":
            return self._finish()
        raise ValueError(f"unknown order {order['do']!r}")

    def _finish(self) -> dict[str, Any]:
        from dataclasses import asdict

        from hasten.measure.profile import ledger_of

        proofs = [(t.name(), t.probe(self.session)) for t in self._switches]
        ledger = ledger_of(self.session)
        self.session.finish()
        return {
            "acted": [{"technique": name, **asdict(proof)} for name, proof in proofs],
            "samples": [asdict(s) for s in self._samples()],
            "ledger": ledger,
        }

    def _samples(self) -> Sequence[Sample]:
        """Every rank brings its part of the model; the first lets it write."""
        from hasten.recipe.sample import write_samples

        setup = self.session.setup
        with setup.layout.gather(self.session.model):
            if not setup.facts.world.is_main:
                return []
            return write_samples(self.session, self.material.tokenizer, self.material.held_out)


def compiled() -> tuple[int, float]:
    """Graphs that torch.compile made in this process so far, and the seconds it took for them."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # nothing was compiled if nobody imported it
    if dynamo is None:
        return 0, 0.0
    spent = dynamo.calculate_time_spent()  # forward and backward graphs, by torch's own clock
    graphs = dynamo.counters["stats"]["unique_graphs"]
    return int(graphs), float(spent.get("total_wall_time", 0.0))


def zygote(recipe_path: str, control: int) -> int:
    """Fork an arm for each plan that comes; in a child, be the arm."""
    global STARTED
    from hasten.measure.zygote import forked

    with contextlib.suppress(Exception):  # an arm will meet it again, and say it
        _import_all(Path(recipe_path))
    task = forked(control)
    if task is None:
        return 0
    STARTED = time.perf_counter()
    return main(*task.task, *task.pipes)


def _import_all(recipe: Path) -> None:
    """What an arm imports, the model's own module with it."""
    import hasten.core.loop
    import hasten.core.session
    import hasten.core.step
    import hasten.core.timing
    import hasten.measure.profile
    import hasten.measure.serving
    import hasten.recipe.peak_flops  # noqa: F401
    from hasten.recipe.build import facts_of
    from hasten.recipe.schema import load_recipe

    facts_of(load_recipe(recipe))


if __name__ == "__main__":
    from hasten.machine.processes import end_with_parent

    end_with_parent()
    if len(sys.argv) == 3:
        code = zygote(sys.argv[1], int(sys.argv[2]))
    else:
        code = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    gc.freeze()  # else the interpreter looks for garbage among all modules, for more than a second
    sys.exit(code)
