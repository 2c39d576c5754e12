"""Who proposes hyper-parameters, and who is given up: Optuna's TPE and its median rule.

All dimensions have an order (rates, sizes), so they are whole numbers to Optuna. What was given up
or failed is told as worse than all that finished, the later the better.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

from hasten.tune.space import Point, Space

if TYPE_CHECKING:
    import optuna

FIRST_LOOKS = 3  # before which none is given up: warm-ups differ in length
STARTUP = 3  # trainings that must be over before one is given up
RANDOM = 4  # points drawn before TPE believes in anything
REPEATED = 8  # proposals that were trained before, until one is drawn at random


def hopeless(trial: optuna.trial.Trial, number: int, loss: float, looks: int) -> bool:
    """Whether a training is to be given up after this look."""
    trial.report(loss, number)
    return number < looks and trial.should_prune()


class LearningSampler:
    """Optuna's TPE and median rule over a space whose dimensions all have an order."""

    def __init__(self, space: Space, looks: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():  # "experimental": multivariate
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                multivariate=True, seed=seed, n_startup_trials=RANDOM
            )
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=STARTUP, n_warmup_steps=min(FIRST_LOOKS, looks)
        )
        self._optuna, self._space = optuna, space
        self._study = optuna.create_study(direction="minimize", sampler=sampler, pruner=pruner)
        self._kinds: dict[str, Any] = {
            d.name: optuna.distributions.IntDistribution(0, len(d.values) - 1)
            for d in space.dimensions
        }
        self._known: dict[Point, dict[str, Any]] = {}
        self._open: dict[Point, optuna.trial.Trial] = {}
        self._points = space.points()
        random.Random(seed).shuffle(self._points)

    def of(self, point: Point) -> optuna.trial.Trial:
        """A trial of just that point."""
        self._study.enqueue_trial(self._params(point))
        trial = self._study.ask(self._kinds)
        self._open[point] = trial
        return trial

    def ask(self) -> tuple[optuna.trial.Trial, Point] | None:
        """What TPE proposes and was not trained; None when all was."""
        for _ in range(REPEATED):
            trial = self._study.ask(self._kinds)
            point = tuple(int(trial.params[d.name]) for d in self._space.dimensions)
            if point not in self._known:
                self._open[point] = trial
                return trial, point
            self._close(trial, self._known[point])
        rest = next((p for p in self._points if p not in self._known), None)
        return None if rest is None else (self.of(rest), rest)

    def tell(self, point: Point, row: dict[str, Any]) -> None:
        """What came of the trial of a point."""
        self._known[point] = row
        self._close(self._open.pop(point), row)

    def add(self, point: Point, row: dict[str, Any]) -> None:
        """A training of an earlier start."""
        trial = self.of(point)
        for number, loss in enumerate(row["losses"], start=1):
            trial.report(loss, number)
        self.tell(point, row)

    def _close(self, trial: optuna.trial.Trial, row: dict[str, Any]) -> None:
        """Finished with its loss; given up or failed: worse than all that finished."""
        if row["state"] == "ok":
            self._study.tell(trial, row["loss"])
        else:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    def _params(self, point: Point) -> dict[str, int]:
        names = [d.name for d in self._space.dimensions]
        return dict(zip(names, point, strict=True))
