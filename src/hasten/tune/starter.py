"""Starts the processes of a recipe's plans, and knows how soon each would be ready."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.experiment import ExperimentSubject, environment
from hasten.measure.nursery import Nursery, nursery
from hasten.measure.trial import ENTRY
from hasten.tune.runners import PlanRunner

ENDLESS = 1_000_000  # steps: a study ends by its budget
COLD = 2.0  # a trial takes so much longer where nothing can be forked yet


class Starter:
    """The processes of a recipe's plans.

    Args:
        given: the recipe and what is known of it.
        folder: where its files are until `opened` says more.
    """

    def __init__(self, given: ExperimentSubject, folder: Path) -> None:
        self._given, self._folder = given, folder
        self.nursery: Nursery | None = None
        self._environs: dict[frozenset[Technique], Mapping[str, str]] = {}
        self._numbers = itertools.count()  # of processes: two of one plan keep logs of their own

    @contextlib.contextmanager
    def opened(self, folder: Path, likely: Plan) -> Iterator[None]:
        """For as long as processes are started; those of a likely plan are prepared at once."""
        self._folder = folder
        steps = {"max_steps": ENDLESS, "epochs": None, "max_tokens": None}
        self._recipe.write_text(self._given.recipe.model_copy(update=steps).to_yaml())
        program = [*ENTRY, str(self._recipe)]
        log, device = folder / "nursery.log", self._given.known.device
        with nursery(program, log, device, self._given.recipe.nproc) as self.nursery:
            if self.nursery is not None:
                self.nursery.prepare(self._environ(likely))
            try:
                yield
            finally:
                self.nursery = None

    @property
    def _recipe(self) -> Path:
        return self._folder / "recipe.yaml"

    def log(self, kind: str) -> Path:
        """A new name for a process's words."""
        return self._folder / f"{kind}-{next(self._numbers)}.log"

    def start(self, plan: Plan) -> PlanRunner:
        log, ranks = self.log("trial"), self._given.recipe.nproc
        alone = self._given.known.device.startswith("cpu")
        environ = self._environ(plan)
        return PlanRunner(self._recipe, plan, environ, log, ranks, self.nursery, stoppable=alone)

    def effort(self, plan: Plan) -> float:
        """A plan whose environment is new has to wait until everything is imported in it."""
        if self.nursery is None or self.nursery.ready(self._environ(plan)):
            return 1.0
        return COLD

    def _environ(self, plan: Plan) -> Mapping[str, str]:
        wishing = frozenset(t for t in plan if type(t).environ is not Technique.environ)
        if wishing not in self._environs:
            recipe, known = self._given.recipe, self._given.known
            self._environs[wishing] = environment(plan, known, recipe.transport)
        return self._environs[wishing]
