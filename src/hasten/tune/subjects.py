"""A recipe as it is tuned: a space of plans, processes to measure in, a final comparison, the
winner's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.machine import processes
from hasten.measure.ablation import AGAIN, BASELINE, Design, Kind, check_turns
from hasten.measure.experiment import SHARE
from hasten.measure.recipe_experiment import ExperimentSubject as Subject_
from hasten.measure.recipe_experiment import measured
from hasten.measure.workers import Worker
from hasten.progress import Audience
from hasten.recipe.build import batch_of, mixed_layouts
from hasten.recipe.shorthands import catalogue
from hasten.recipe.suggest import recipe_text
from hasten.tune.bench import turn_steps
from hasten.tune.recipe_workers import RecipeWorkers
from hasten.tune.report import final_rows
from hasten.tune.samplers import PriorKnowledge, Sampler, check_sampler
from hasten.tune.space import Point, plan_space
from hasten.tune.study import OBJECTIVES, Objective


@dataclass(frozen=True)
class TuneOptions:
    """Options of a tuning.

    Args:
        sampler: the proposer of points; auto: hasten's own order.
        objective: tokens (tokens per second), or memory.
        lossy: include techniques that change the mathematics, if they pass the
            verification.
        only: names of slots or techniques to tune.
        trials: maximum; None: as many as the budget holds.
        seed: seed of all random numbers.
        steps: steps of a round.
        fresh: measure again, even if results of an earlier start are stored.

    Raises:
        InputError: an unknown sampler or objective, or an invalid number.
    """

    sampler: Sampler = "auto"
    objective: Objective = "tokens"
    lossy: bool = False
    only: tuple[str, ...] = ()
    trials: int | None = None
    seed: int = 0
    steps: int = 4
    fresh: bool = False

    def __post_init__(self) -> None:
        check_sampler(self.sampler)
        if self.objective not in OBJECTIVES:
            choices = ", ".join(OBJECTIVES)
            raise InputError(f"objective: there is no {self.objective!r}; there are {choices}")
        for name, value in (("trials", self.trials), ("steps", self.steps)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be 1 at least")


Prove = Callable[[Subject_, Plan], Sequence[str]]
FINISH = 0.9  # of the time that is left goes into the final comparison; the rest is for its end
DUEL = Design(rounds=20, warmup=2, longest_warmup=8, evaluations=0, noise=True, foreign_load=0.35)


class RecipeSubject:
    """A recipe with prepared data.

    Args:
        subject: the recipe and its context.
        options: settings of the tuning.
        audience: receives the progress.
        prove: runs the verification and returns its objections to a plan.
    """

    unit = "tokens/s"

    def __init__(
        self,
        subject: Subject_,
        options: TuneOptions,
        audience: Audience,
        prove: Prove | None = None,
    ) -> None:
        recipe, context = subject.recipe, subject.context
        self._given, self._options, self._audience = subject, options, audience
        self._prove, self._device = prove, context.device
        # A micro-batch is no larger than half a step; what is cut is cut by examples alone.
        most = max((batch_of(recipe).examples or 64) // 2, 1)
        bounds = {
            "gradient_accumulation.micro_batch_size": (1, most),
            "gradient_accumulation.micro_batch_tokens": (1, 0),
        }
        self._plans = plan_space(
            catalogue(),
            subject.plan,
            context,
            bounds,
            options.lossy,
            options.only,
            mixed_layouts(recipe.nproc),
        )
        self.space = replace(self._plans.space, refuse=self._refused)
        self.folder = Path(recipe.output) / "studies"
        self.title = f"Tuning of {recipe.model}"
        # Exchanges between ranks fall on whole turns.
        self.together = 1 if recipe.nproc == 1 else options.steps
        self._workers = RecipeWorkers(subject)

    def key(self) -> dict[str, Any]:
        subject = self._given
        return {
            "recipe": subject.recipe.model_dump(mode="json", exclude={"price", "output"}),
            "data": subject.data_key,
            "space": [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions],
            "hardware": {**asdict(subject.context.hardware), "device": self._device},
            "versions": dict(subject.context.versions),
        }

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        likely = self.space.summit(self._plans.gain, self._options.seed)
        return self._workers.opened(folder, self._plans.plan(likely))

    def prior_knowledge(self, noise: float, memory: float | None) -> PriorKnowledge:
        """Predictions of the techniques, and the free memory next to the start's process."""
        hardware = self._given.context.hardware
        free = processes.available_bytes(hardware.memory_limit_bytes)
        free //= self._given.recipe.nproc  # a peak is that of one rank, and ranks share a host
        if not self._device.startswith("cpu"):
            free = min((g.memory_bytes for g in hardware.accelerators), default=free)
            free -= int(memory or 0)
        first = self._plans.resident(self.space.start)

        def effort(point: Point) -> float:
            return self._workers.effort(self._plans.plan(point))

        def peak(point: Point) -> float:
            assert memory is not None
            return max(memory + self._plans.resident(point) - first, 0.1 * memory)

        known_peak = None if memory is None else peak
        return PriorKnowledge(self._plans.gain, known_peak, SHARE * free, noise, effort)

    def start(self, point: Point) -> Worker:
        return self._workers.start(self._plans.plan(point))

    def final_comparison(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        """Rows of the final comparison, measured as `hasten speedup` does.

        They are the start, the start again, then the leaders.

        The budget drops the second baseline last, and never the last variant, which is the
        result.

        Args:
            leaders: the best points, the first one first.
            seconds: time for the comparison.
            step_seconds: seconds of a step of the start.
            ``tell``: reports progress.
        """
        design = replace(
            DUEL,
            steps=turn_steps(self._options.steps, step_seconds, self.together),
            seed=self._options.seed,
            evaluations=1,
            budget_seconds=max(FINISH * seconds, 1.0),
        )
        choices = {f"choice {n}": point for n, point in enumerate(leaders, start=1)}
        start = self.space.start
        points = {BASELINE: start, AGAIN: start, **dict(reversed(choices.items()))}
        kinds: dict[str, Kind] = {BASELINE: "baseline", AGAIN: "again"}
        names = [BASELINE, AGAIN, *choices]
        try:
            experiment = measured(
                self._given,
                {name: self._plans.plan(point) for name, point in points.items()},
                {**dict.fromkeys(choices, "other"), **kinds},
                design,
                self._options.fresh,
                _FinalProgress(self._audience, tell),
                self._workers.pool,
            )
            if (why := experiment.variants[0].failed) is not None:
                raise InputError(f"the job as it is failed: {why}")
        except InputError as error:  # or the budget left no room for two rounds
            reason = f"no final_comparison: {error}"
            return {"noise_floor": None, "variants": [_unmeasured(name, reason) for name in names]}
        rows = final_rows(experiment.variants)
        by_name = {row["name"]: row for row in rows["variants"]}
        every = [by_name.get(name) or _unmeasured(name) for name in names]
        return {**rows, "variants": every, "design": experiment.design}

    def refusal(self, point: Point) -> str | None:
        """The verification's objection to a plan with lossy techniques that the recipe lacked."""
        plan = self._plans.plan(point)
        recipe_techniques = set(self._given.plan)
        new = [t for t in plan if t.fidelity is Fidelity.LOSSY and t not in recipe_techniques]
        if not new:
            return None
        if self._prove is None:
            return f"{new[0]} is other mathematics, and no proof of its quality was requested"
        try:
            return next(iter(self._prove(self._given, plan)), None)
        except InputError as error:  # the study is not lost for it
            return f"{new[0]} is other mathematics, and can't be proven here: {error}"

    def _refused(self, point: Point) -> str | None:
        """The reason why a point is refused.

        With several ranks, turns that would hide the cost of communication are refused, too.
        """
        reason = self._plans.space.refuse(point)
        if reason is not None or self._given.recipe.nproc == 1:
            return reason
        try:
            check_turns({"trial": self._plans.plan(point)}, self._options.steps)
        except InputError as error:
            return str(error)
        return None

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        return self._plans.without(point, idle)

    def text(self, point: Point, comments: Sequence[str]) -> str:
        """The recipe with a point's plan; every line of it that isn't a default."""
        return recipe_text(self._given.recipe, self._plans.plan(point), comments)


class _FinalProgress:
    """Hands a final comparison's progress on without its own share, which is that of another
    budget.
    """

    def __init__(self, audience: Audience, tell: Callable[[str], None]) -> None:
        self._audience, self._tell = audience, tell

    def tell(self, text: str) -> None:
        self._audience.tell(text)

    def begin(self) -> None:
        pass

    def show(self, text: str, share: float) -> None:
        self._tell(f"final_comparison: {text}")


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
