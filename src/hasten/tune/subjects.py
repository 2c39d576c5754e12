"""What can be tuned: a recipe, by its plan's decisions, or a training loop, by its arguments."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.machine import host, processes
from hasten.measure.ablation import AGAIN, BASELINE, Design, Kind, check_turns
from hasten.measure.experiment import SHARE, Measured, experiment_context, measure_arms
from hasten.measure.loops import loop_spec
from hasten.measure.recipe_experiment import ExperimentSubject as Subject_
from hasten.measure.recipe_experiment import measured
from hasten.measure.schedule import TurnWorker
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.progress import Audience
from hasten.recipe.build import batch_of, mixed_layouts
from hasten.recipe.schema import Recipe
from hasten.recipe.shorthands import catalogue
from hasten.recipe.suggest import recipe_text
from hasten.tune.bench import turn_steps
from hasten.tune.race import LOOKS, races
from hasten.tune.recipe_workers import RecipeWorkers
from hasten.tune.report import duel_rows
from hasten.tune.samplers import PriorKnowledge, Sampler, check_sampler
from hasten.tune.space import Point, Space, plan_space
from hasten.tune.study import OBJECTIVES, Objective
from hasten.tune.whole_trainings import TrainingProcess, begin_training, steps_of

# What can be tuned, seen from the study: a space, processes to measure in, a duel, a result.


@dataclass(frozen=True)
class TuneOptions:
    """How to tune.

    Args:
        sampler: who proposes; auto: hasten's own order.
        objective: tokens per second; memory; money, which is time told as a price; pareto: speed
            and memory, and the front between them; time-to-loss: to a held-out loss.
        target_loss: of time-to-loss; None: nearly what the recipe as it is comes to.
        lossy: let techniques of other mathematics take part, behind the guard.
        only: slots or techniques by name that are tuned.
        trials: at most; None: as many as the budget holds.
        seed: of everything that is drawn.
        steps: of a round.
        fresh: measure anew, whatever an earlier start has left.

    Raises:
        InputError: an unknown sampler or objective, or a number that can't be.
    """

    sampler: Sampler = "auto"
    objective: Objective = "tokens"
    lossy: bool = False
    only: tuple[str, ...] = ()
    trials: int | None = None
    seed: int = 0
    steps: int = 4
    fresh: bool = False
    target_loss: float | None = None

    def __post_init__(self) -> None:
        check_sampler(self.sampler)
        if self.objective not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"objective: there is no {self.objective!r}; there are {known}")
        if self.target_loss is not None and self.objective != "time-to-loss":
            raise InputError("target_loss is of the objective time-to-loss; leave it out")
        for name, value in (("trials", self.trials), ("steps", self.steps)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 at least")


class TuneTarget(Protocol):
    """A job that is tuned."""

    space: Space
    folder: Path  # of all its studies
    title: str
    unit: str  # what its speed counts
    about: dict[str, Any]  # what similar jobs share
    together: int  # steps that no turn parts

    def key(self) -> dict[str, Any]:
        """Everything that decides its numbers."""

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        """For as long as points are measured; ``folder`` is where this study's files are."""

    def known(self, noise: float, memory: float | None) -> PriorKnowledge:
        """What is known before the first trial, now that the start was measured."""

    def start(self, point: Point) -> TurnWorker:
        """The worker of a point."""

    def duel(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """The duel's rows (`tune.report.duel_rows`): the start, again, then the leaders.

        Args:
            seconds: that there are for it.
            step_seconds: of a step of the start's.
        """

    def refusal(self, point: Point) -> str | None:
        """Why a winner can't be taken after all; None if it can."""

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        """The point without techniques that were seen not to act, and whom it lost."""

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The settings as a file of the user's, with words as comments at its head."""


# A recipe as a subject: its own job is what is measured.

Prove = Callable[[Subject_, Plan], Sequence[str]]
RACERS = 2  # leaders in a race of whole trainings, beside the start
FINISH = 0.9  # of the time that is left goes into the duel; the rest is for its end
DUEL = Design(rounds=20, warmup=2, longest_warmup=8, evaluations=0, noise=True, foreign_load=0.35)


class RecipeSubject:
    """A recipe whose data is ready.

    Args:
        given: the recipe and what is known of it.
        options: how.
        audience: is told how it goes on.
        prove: finds what the guard has against a plan.
    """

    unit = "tokens/s"

    def __init__(
        self, given: Subject_, options: TuneOptions, audience: Audience, prove: Prove | None = None
    ) -> None:
        recipe, known = given.recipe, given.known
        _check(given, options.objective)
        self._given, self._options, self._audience = given, options, audience
        self._prove, self._device = prove, known.device
        self._plans = plan_space(
            catalogue(),
            given.plan,
            known,
            _bounds(recipe),
            options.lossy,
            options.only,
            mixed_layouts(recipe.nproc),
        )
        self.space = replace(self._plans.space, refuse=self._refused)
        self.folder = Path(recipe.output) / "studies"
        self.title = f"Tuning of {recipe.model}"
        self.about = {
            "architecture": known.model.architecture,
            "device": known.device,
            "objective": options.objective,
            **({"ranks": recipe.nproc} if recipe.nproc > 1 else {}),
        }
        # Exchanges between ranks fall on whole turns.
        self.together = 1 if recipe.nproc == 1 else options.steps
        self._workers = RecipeWorkers(given)

    def key(self) -> dict[str, Any]:
        given = self._given
        return {
            "recipe": given.recipe.model_dump(mode="json", exclude={"price", "output"}),
            "data": given.data_key,
            "space": [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions],
            "hardware": {**asdict(given.known.hardware), "device": self._device},
            "versions": dict(given.known.versions),
        }

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        likely = self.space.summit(self._plans.gain, self._options.seed)
        return self._workers.opened(folder, self._plans.plan(likely))

    def known(self, noise: float, memory: float | None) -> PriorKnowledge:
        """Forecasts of the techniques; the memory that is left beside the start's process."""
        hardware = self._given.known.hardware
        free = processes.available_bytes(hardware.memory_limit_bytes)
        free //= self._given.recipe.nproc  # a peak is that of one rank, and ranks share a host
        if not self._device.startswith("cpu"):
            free = min((g.memory_bytes for g in hardware.accelerators), default=free)
            free -= int(memory or 0)
        limit = SHARE * free
        if memory is None:
            return PriorKnowledge(self._plans.gain, None, limit, noise, self._effort)
        first = self._plans.resident(self.space.start)

        def peak(point: Point) -> float:
            return max(memory + self._plans.resident(point) - first, 0.1 * memory)

        return PriorKnowledge(self._plans.gain, peak, limit, noise, self._effort)

    def start(self, point: Point) -> TurnWorker:
        return self._workers.start(self._plans.plan(point))

    def _effort(self, point: Point) -> float:
        return self._workers.effort(self._plans.plan(point))

    def duel(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """As `hasten speedup` measures: held-out losses, proofs of what acted, a record.

        For the time to a loss, races of whole trainings take its place.
        """
        if self._options.objective == "time-to-loss":
            return self._races(leaders, seconds, tell)
        steps = turn_steps(self._options.steps, step_seconds, self.together)
        design = replace(DUEL, steps=steps, seed=self._options.seed, evaluations=1)

        def measure(points: Mapping[str, Point], kinds: Mapping[str, Kind]) -> Measured:
            return measured(
                self._given,
                {name: self._plans.plan(point) for name, point in points.items()},
                kinds,
                _within(design, seconds),
                self._options.fresh,
                _DuelProgress(self._audience, tell),
                self._workers.pool,
            )

        return _duel(self.space.start, leaders, measure)

    def _races(
        self, leaders: Sequence[Point], seconds: float, tell: Callable[[str], None]
    ) -> dict[str, Any]:
        given, options = self._given, self._options
        deadline = time.monotonic() + FINISH * seconds
        steps = steps_of(given)

        def begin(point: Point, seed: int) -> TrainingProcess:
            return begin_training(
                self._workers, self._plans.plan(point), {"seed": seed}, steps, LOOKS
            )

        found = races(
            begin,
            self.space.start,
            leaders[:RACERS],
            deadline,
            options.target_loss,
            given.recipe.seed,
            LOOKS,
            tell,
        )
        base, *rows = found["arms"]
        names = [f"choice {n}" for n in range(len(rows) + 1, len(leaders) + 1)]
        rows += [_unmeasured(name, "no place in the race") for name in names]
        return {**found, "arms": [base, _unmeasured(AGAIN, "a race has none"), *rows]}

    def refusal(self, point: Point) -> str | None:
        """What the guard has against a plan with lossy techniques that the recipe hadn't.

        A race was to the same held-out loss: that is the proof of its winner.
        """
        if self._options.objective == "time-to-loss":
            return None
        plan = self._plans.plan(point)
        own = set(self._given.plan)
        new = [t for t in plan if t.fidelity is Fidelity.LOSSY and t not in own]
        if not new:
            return None
        if self._prove is None:
            return f"{new[0]} is other mathematics, and nobody was asked to prove its quality"
        try:
            return next(iter(self._prove(self._given, plan)), None)
        except InputError as error:  # the study is not lost for it
            return f"{new[0]} is other mathematics, and can't be proven here: {error}"

    def _refused(self, point: Point) -> str | None:
        """What the plans refuse; on ranks also turns that would hide what an exchange costs."""
        said = self._plans.space.refuse(point)
        if said is not None or self._given.recipe.nproc == 1:
            return said
        try:
            check_turns({"trial": self._plans.plan(point)}, self._options.steps)
        except InputError as error:
            return str(error)
        return None

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        return self._plans.without(point, idle)

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The recipe with a point's plan; every line of it that isn't a default."""
        return recipe_text(self._given.recipe, self._plans.plan(point), words)


class _DuelProgress:
    """Hands a duel's progress on without its own share, which is that of another budget."""

    def __init__(self, audience: Audience, tell: Callable[[str], None]) -> None:
        self._audience, self._tell = audience, tell

    def tell(self, text: str) -> None:
        self._audience.tell(text)

    def begin(self) -> None:
        pass

    def show(self, text: str, share: float) -> None:
        self._tell(f"duel: {text}")


def _check(given: Subject_, objective: str) -> None:
    """Refuse an objective that the recipe doesn't allow."""
    recipe = given.recipe
    if objective == "money" and recipe.price is None:
        raise InputError("objective: money needs a price; give price in the recipe")
    if objective != "time-to-loss":
        return
    if recipe.nproc > 1:
        raise InputError("objective: time-to-loss races single processes; set nproc: 1")
    if not recipe.held_out:
        raise InputError("held_out: time-to-loss needs held-out records; hold some out")
    if steps_of(given) < LOOKS:
        raise InputError(f"a training of fewer than {LOOKS} steps is no race; give it more")


def _bounds(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """What follows from the job: a micro-batch is no larger than a step; cut by records alone."""
    batch = batch_of(recipe)
    most = max((batch.records or 64) // 2, 1)
    return {
        "accumulate.micro_batch_size": (1, most),
        "accumulate.micro_batch_tokens": (1, 0),  # the same cut in another unit
    }


def _within(design: Design, seconds: float) -> Design:
    return replace(design, budget_seconds=max(FINISH * seconds, 1.0))


def _duel(
    start: Point,
    leaders: Sequence[Point],
    measure: Callable[[Mapping[str, Point], Mapping[str, Kind]], Measured],
) -> dict[str, Any]:
    """The rows of an experiment on the start, the start again, and the leaders.

    The budget drops the second baseline last, and never the last arm, which is the result.
    """
    choices = {f"choice {n}": point for n, point in enumerate(leaders, start=1)}
    points = {BASELINE: start, AGAIN: start, **dict(reversed(choices.items()))}
    kinds: dict[str, Kind] = {BASELINE: "baseline", AGAIN: "again"}
    names = [BASELINE, AGAIN, *choices]
    try:
        found = measure(points, {**dict.fromkeys(choices, "other"), **kinds})
        if (why := found.arms[0].failed) is not None:
            raise InputError(f"the job as it is failed: {why}")
    except InputError as error:  # or the budget left no room for two rounds
        reason = f"no duel: {error}"
        return {"noise_floor": None, "arms": [_unmeasured(name, reason) for name in names]}
    rows = duel_rows(found.arms)
    by_name = {row["name"]: row for row in rows["arms"]}
    every = [by_name.get(name) or _unmeasured(name) for name in names]
    return {**rows, "arms": every, "design": found.design}


def _unmeasured(name: str, why: str = "no time for it") -> dict[str, Any]:
    return {
        "name": name,
        "verdict": f"undecided: {why}",
        "p_value": None,
        "ratio": {"median": None, "low": None, "high": None},
        "rounds": [],
        "peak_memory_bytes": None,
        "failed": None,
        "idle": [],
    }


# A training loop of anybody's as a subject: its factory's arguments are the settings.


class LoopSubject:
    """A factory that takes the settings as arguments.

    Args:
        target: ``module:function`` or ``/path/script.py:function``.
        space: the arguments and their values.
        folder: of its studies.
        options: how.
    """

    unit = "items/s"
    together = 1

    def __init__(self, target: str, space: Space, folder: Path, options: TuneOptions) -> None:
        self._target, self.space, self.folder, self._options = target, space, folder, options
        self.title = target.rpartition("/")[2]
        self.about = {"loop": target}
        self._numbers = itertools.count()

    def key(self) -> dict[str, Any]:
        place = self._target.rpartition(":")[0]
        source = Path(place).read_text() if place.endswith(".py") else ""
        names = [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions]
        return {
            "loop": self._target,
            "source": source,
            "space": names,
            "start": self.space.start,
            "hardware": asdict(host.hardware()),
        }

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        with WorkerPool(folder) as self._pool:
            yield

    def known(self, noise: float, memory: float | None) -> PriorKnowledge:
        limit = SHARE * processes.available_bytes(host.hardware().memory_limit_bytes)
        return PriorKnowledge(limit=limit, noise=noise)

    def start(self, point: Point) -> TurnWorker:
        return self._pool.start(self._spec(point), f"worker-{next(self._numbers)}")

    def _spec(self, point: Point) -> WorkerSpec:
        return loop_spec(self._target, self.space.settings(point))

    def duel(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        design = replace(DUEL, steps=self._options.steps, seed=self._options.seed)

        def measure(points: Mapping[str, Point], kinds: Mapping[str, Kind]) -> Measured:
            at = experiment_context(self._pool, lambda name: self._spec(points[name]))
            plans = dict.fromkeys(points, Plan())

            def show(text: str, share: float) -> None:
                tell(f"duel: {text}")

            return measure_arms(at, plans, _within(design, seconds), show, kinds=kinds)

        return _duel(self.space.start, leaders, measure)

    def refusal(self, point: Point) -> str | None:
        return None

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        return point, []

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The arguments as JSON; words under ``_measured``, since JSON has no comments."""
        return json.dumps({"_measured": list(words), **self.space.settings(point)}, indent=1) + "\n"
