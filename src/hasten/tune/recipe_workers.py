"""The workers of a recipe's plans, for a study."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.recipe_experiment import ExperimentSubject, recipe_worker
from hasten.measure.workers import Worker, WorkerPool

ENDLESS = 1_000_000  # steps: a study ends by its budget


class RecipeWorkers:
    """The workers of a recipe's plans, for a study.

    Args:
        subject: the recipe and what is known of it.
    """

    def __init__(self, subject: ExperimentSubject) -> None:
        self._given = subject
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
        with WorkerPool(folder, self._given.context.device, forks, self._recipe) as self.pool:
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
        wishing = frozenset(t for t in plan if type(t).environment is not Technique.environment)
        if wishing not in self._environs:
            self._environs[wishing] = self._given.environment(plan)
        return self._environs[wishing]
