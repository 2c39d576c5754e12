"""Runners: workers in which points are measured, of a recipe's plan or a loop of the user's own."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.recipe_experiment import ExperimentSubject, environment, recipe_worker
from hasten.measure.turns import Step
from hasten.measure.workers import Reply, Worker, WorkerPool

ENDLESS = 1_000_000  # steps: a study ends by its budget


class PlanRunner:
    """The worker of a recipe under one plan."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.parts = self if worker.can_slice else None
        self.pace, self._worked = 1.0, 0.0
        self._again = False

    def begin(self, timeout: float) -> None:
        self._worker.ready(timeout)

    def again(self) -> None:
        self._again = True

    def steps(self, count: int, timeout: float) -> list[Step]:
        reply = self._worker.request("steps", timeout, **self._wanted(count))
        steps = self._read(reply)
        whole = reply.get("turn_seconds")
        if whole is not None:
            # Ranks that train apart meet in some steps alone: what counts is the turn as a whole.
            steps = [replace(step, seconds=whole / len(steps)) for step in steps]
        self.pace = math.fsum(step.seconds for step in steps) / len(steps)
        return steps

    def order(self, count: int) -> None:
        self._worked = 0.0
        self._worker.submit("steps", **self._wanted(count))

    def go_on(self, seconds: float) -> list[Step] | None:
        began = time.perf_counter()
        reply = self._worker.run_for(seconds)
        self._worked += time.perf_counter() - began
        if reply is None:
            return None
        steps = self._read(reply)
        self.pace = self._worked / len(steps)
        # By the process's own clock they have lasted as long as it was stopped, too.
        one = self._worked / (math.fsum(step.items for step in steps) or 1.0)
        return [replace(step, seconds=one * step.items) for step in steps]

    def end(self, at_once: bool = False) -> None:
        self._worker.close(kill=at_once)

    def _wanted(self, count: int) -> dict[str, Any]:
        more = {"from_start": True} if self._again else {}
        self._again = False
        return {"count": count, **more}

    def _read(self, reply: Reply) -> list[Step]:
        return [_step(entry) for entry in reply["steps"]]


class LoopRunner(PlanRunner):
    """The worker of a training loop of the user's own."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.parts = None  # the loop may wait for what goes on while it is stopped

    def again(self) -> None:
        """A loop brings its own data, and goes on."""

    def _read(self, reply: Reply) -> list[Step]:
        return [Step(items, seconds) for items, seconds, _ in reply["steps"]]


def _step(entry: Mapping[str, Any]) -> Step:
    loss = entry.get("loss")
    sound = loss is None or math.isfinite(loss)
    return Step(entry["tokens"], entry["step_seconds"], entry.get("peak_memory_bytes"), sound)


class RecipeWorkers:
    """The workers of a recipe's plans, for a study.

    Args:
        given: the recipe and what is known of it.
    """

    def __init__(self, given: ExperimentSubject) -> None:
        self._given = given
        self._environs: dict[frozenset[Technique], Mapping[str, str]] = {}
        self._numbers = itertools.count()  # two workers of one plan have logs of their own
        self.pool: WorkerPool | None = None

    @contextlib.contextmanager
    def opened(self, folder: Path, likely: Plan) -> Iterator[None]:
        """For as long as workers are started; those of a likely plan are prepared at once."""
        steps = {"max_steps": ENDLESS, "epochs": None, "max_tokens": None}
        self._recipe = folder / "recipe.yaml"
        self._recipe.write_text(self._given.recipe.model_copy(update=steps).to_yaml())
        forks = self._given.recipe.nproc == 1
        with WorkerPool(folder, self._given.known.device, forks, self._recipe) as self.pool:
            self.pool.warm_up(self._environ(likely))
            try:
                yield
            finally:
                self.pool = None

    def start(self, plan: Plan, changes: Mapping[str, Any] | None = None) -> Worker:
        """A worker of a plan, with changes of the recipe's keys."""
        assert self.pool is not None  # `opened` has made it
        spec = recipe_worker(self._given, self._recipe, plan, changes)
        return self.pool.start(spec, f"worker-{next(self._numbers)}")

    def effort(self, plan: Plan) -> float:
        """See `WorkerPool.start_cost`."""
        return 1.0 if self.pool is None else self.pool.start_cost(self._environ(plan))

    def _environ(self, plan: Plan) -> Mapping[str, str]:
        """Remembered by the techniques that it depends on: studies ask for many plans."""
        wishing = frozenset(t for t in plan if type(t).environ is not Technique.environ)
        if wishing not in self._environs:
            recipe, known = self._given.recipe, self._given.known
            self._environs[wishing] = environment(plan, known, recipe.transport)
        return self._environs[wishing]
