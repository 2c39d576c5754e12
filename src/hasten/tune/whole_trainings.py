"""Full trainings of a recipe with other hyper-parameters, each in its own process.

All have the tokens, the data and the plan of the recipe. Another batch size has
correspondingly more or fewer steps, and warm-up is a share of these. Each training
waits at its evaluation points while its eval loss is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hasten.core.job import share_of
from hasten.errors import InputError
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.measure.workers import Worker
from hasten.recipe.build import batch_of, job_of
from hasten.recipe.prepared_data import prepare_data
from hasten.recipe.schema import Recipe
from hasten.tune.recipe_workers import RecipeWorkers
from hasten.tune.space import Dimension, Point, Space

RATE, WARMUP = "learning_rate", "warmup_share"
TIMES = [2 ** (k / 2) for k in range(-6, 7)]  # the own rate, from an eighth of it to eight times
WARMUPS = (0.0, 0.01, 0.03, 0.1)
BATCHES = (0.5, 1, 2)  # times the own batch
FEWEST_STEPS = 4
LOOKS = 8  # of a training at its eval loss
APART = 0.01  # of the tokens: by so much a training of whole steps may miss the recipe's


class RecipeTrainings:
    """Trainings of a recipe with prepared data and other hyper-parameters.

    Args:
        subject: the recipe and its context.
        only: the values to tune, see `hasten.tune.learning_study.learn`.
    """

    def __init__(self, subject: ExperimentSubject, only: Sequence[str] = ()) -> None:
        recipe = subject.recipe
        self.subject = subject
        self._data = prepare_data(recipe, Path(recipe.output) / "data")
        if not len(self._data.eval_data):
            raise InputError("eval_data: the study compares eval losses; hold some examples out")
        self._batch = "global_batch_tokens" if recipe.global_batch_tokens else "global_batch_size"
        batch = batch_of(recipe)
        self._own = batch.tokens if recipe.global_batch_tokens else batch.examples
        steps = self._steps_of(recipe)
        self.space = self._space(steps, only)
        sizes = [d.values for d in self.space.dimensions if d.name == self._batch]
        fewest = int(steps * (self._own or 1) / max(*sizes[0], 1)) if sizes else steps
        if fewest < FEWEST_STEPS:
            raise InputError(f"the training has {steps} steps, too few to study; give it more")
        self.looks = min(LOOKS, fewest)
        self._workers = RecipeWorkers(subject)

    def key(self) -> dict[str, Any]:
        """Everything that decides the losses."""
        subject = self.subject
        return {
            "study": "learning",
            "recipe": subject.recipe.model_dump(mode="json", exclude={"price", "output"}),
            "data": subject.data_key,
            "space": [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions],
            "device": subject.context.device,
            "versions": dict(subject.context.versions),
        }

    def recipe_at(self, point: Point) -> Recipe:
        """The recipe with a point's values, for as many tokens as before."""
        recipe, chosen = self.subject.recipe, self.space.settings(point)
        changed: dict[str, Any] = {RATE: chosen.get(RATE, recipe.learning_rate)}
        batch = chosen.get(self._batch)
        if batch is not None and batch != self._own:
            changed[self._batch] = batch
            if recipe.max_steps:
                changed["max_steps"] = max(1, round(recipe.max_steps * (self._own or 1) / batch))
        changed_recipe = recipe.model_copy(update=changed)
        if WARMUP in chosen and point != self.space.start:
            warm = round(chosen[WARMUP] * self._steps_of(changed_recipe))
            changed_recipe = changed_recipe.model_copy(update={"warmup_steps": warm})
        return changed_recipe

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """For as long as trainings are begun; their files are in ``folder``."""
        return self._workers.opened(folder, self.subject.plan)

    def begin(self, point: Point, seed: int) -> TrainingProcess:
        """The training of a point, begun."""
        changed = self.recipe_at(point)
        values = {name: getattr(changed, name) for name in (RATE, self._batch, "warmup_steps")}
        steps = self._steps_of(changed)
        # It ends by steps, where its looks end: a number of tokens ends within a step.
        ends = {"seed": seed, "max_steps": steps, "epochs": None, "max_tokens": None}
        worker = self._workers.start(self.subject.plan, {**values, **ends})
        return TrainingProcess(
            worker, [round(steps * n / self.looks) for n in range(self.looks + 1)]
        )

    def _steps_of(self, recipe: Recipe) -> int:
        subject = self.subject
        return job_of(recipe, self._data, subject.context, subject.plan).schedule.total_steps

    def _space(self, steps: int, only: Sequence[str]) -> Space:
        recipe, start_batch = self.subject.recipe, self._own or 1
        warm = share_of(recipe.warmup_steps, steps)
        share = warm / steps
        rates = {float(f"{recipe.learning_rate * t:.3g}") for t in TIMES if t != 1}
        steps_of = {round(s * steps): s for s in WARMUPS}  # those that make a difference
        steps_of[warm] = share
        train = self._data.train
        most = int(train.lengths.sum()) if recipe.global_batch_tokens else len(train)
        batches = {start_batch, *(b for t in BATCHES if 1 <= (b := round(start_batch * t)) <= most)}
        batches = {b for b in batches if _as_long(recipe.max_steps, b / start_batch)}
        every: dict[str, tuple[str, list[Any], Any]] = {
            "learning_rate": (RATE, sorted({recipe.learning_rate, *rates}), recipe.learning_rate),
            "warmup": (WARMUP, sorted(steps_of.values()), share),
            "batch": (self._batch, sorted(batches), start_batch),
        }
        chosen = [every[n] for n in every if not only or n in only]
        chosen = [(name, values, first) for name, values, first in chosen if len(values) > 1]
        dimensions = tuple(Dimension(n, tuple(v), ordered=True) for n, v, _ in chosen)
        return Space(dimensions, tuple(v.index(first) for _, v, first in chosen))


def _as_long(steps: int | None, times: float) -> bool:
    """Returns True if whole steps, larger by ``times``, have the same total of tokens."""
    if not steps:
        return True  # it ends by tokens or epochs, whatever its steps
    return abs(round(steps / times) * times / steps - 1) <= APART


class TrainingProcess:
    """A training that waits at its looks.

    Args:
        worker: just started.
        steps: done before each look, the first of them 0.
    """

    def __init__(self, worker: Worker, steps: Sequence[int]) -> None:
        self._worker, self._steps, self._begun = worker, steps, False

    def loss_at(self, look: int, patience: float) -> float:
        """Train on to that look, counted from 1; its eval loss. Raises WorkerError."""
        deadline = time.monotonic() + patience

        def remaining() -> float:
            return max(deadline - time.monotonic(), 0.0)

        if not self._begun:
            self._worker.ready(remaining())
            self._begun = True
        count = self._steps[look] - self._steps[look - 1]
        self._worker.request("steps", remaining(), count=count)
        return float(self._worker.request("evaluate", remaining())["eval_loss"])

    def end(self, at_once: bool = False) -> None:
        """End the process; harmless when it has ended."""
        self._worker.close(kill=at_once)
