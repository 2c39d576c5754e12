"""Proposers choose the next point: hasten's own order, an Optuna sampler, or a bandit.

A proposer never proposes a point twice, nor one that the space refuses. `auto` is
hasten's own:

  1. The first trials follow the forecast: the best point that it expects within memory.
  2. Every result corrects the model (`surrogate.PlanGaussianProcess`). Of the points
     around the best one, the one with the largest expected gain is next. Memory is
     predicted in the same way, from measured peaks. A point that is likely to exceed it
     isn't tried.
  3. Each trial that ran out of memory makes the next ones more careful.

Optuna's Gaussian process isn't used for `auto`. It has no forecast as its mean and no
constraint on a predicted peak. On the recorded grid, with a weak forecast, it needs 5
trials until within 3 % of the best, and `auto` needs 8. If half of a space is out of
memory, it succeeds in a quarter of the studies of 40 trials. There `auto` succeeds in
all, after 6 trials (docs/explanation/results.md, "Trials until the best settings").
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hasten.tune.bench import State
from hasten.tune.space import Point, Space
from hasten.tune.surrogate import PlanGaussianProcess, expected_improvement, normal_cdf

if TYPE_CHECKING:
    import optuna

CAREFUL = (0.3, 0.02, 0.001)  # risk of running out of memory taken after 0, 1, 2 such trials
LAST_RISK = 0.25  # of the safest point that is left, beyond which nothing is tried
PEAK_SCALES = (0.05, 0.2, 0.6)  # of what a choice adds to the logarithm of the peak
OF_MEDIAN = 0.67  # of the noise is left in the median of a trial's three rounds
OF_ROUNDS = {1: 1 / OF_MEDIAN, 2: 0.71 / OF_MEDIAN}  # of that, where a trial had fewer
BEFORE = 3  # times that the noise given beforehand counts as seen
CLOSE = 2  # choices by which a point around the best one differs
PROMISING = 0.005  # expected gain there, below which the search looks further away
BEYOND = 0.15  # by which a point that ran out of memory is taken to exceed the limit
WORSE = 0.1  # below all results: a trial without one, as a logarithm


@dataclass(frozen=True)
class TriedPoint:
    """The result of a point: the logarithm of its value over the start's, more is better.

    The field ``rounds`` has the logarithms; the value is their median. The field ``curve``
    has the values of a training at each evaluation, which may stop it (``pruned``).
    """

    point: Point
    state: State
    value: float | None = None
    memory: float | None = None
    rounds: tuple[float, ...] = ()
    curve: tuple[float, ...] = ()


@dataclass(frozen=True)
class PriorKnowledge:
    """Predictions for a job before any measurement.

    Args:
        gain: expected logarithm of the value over the start's.
        memory: expected peak in bytes; None if unknown.
        limit: limit of that peak; None: no relevant limit.
        noise: standard deviation of one measurement, as a logarithm.
        effort: time of a point's trial except measuring, over the minimum; it may change
            from trial to trial.
    """

    gain: Callable[[Point], float] = lambda point: 0.0
    memory: Callable[[Point], float] | None = None
    limit: float | None = None
    noise: float = 0.02
    effort: Callable[[Point], float] = lambda point: 1.0


class Proposer:
    """Every point once, in an order drawn by the seed; the others refine ``ask``."""

    def __init__(self, space: Space, seed: int = 0, *more: Point) -> None:
        self.space = space
        self.told: dict[Point, TriedPoint] = {}
        self._points = list(dict.fromkeys((*space.points(seed), *more)))
        random.Random(seed).shuffle(self._points)

    def ask(self) -> Point | None:
        """The next point; None when there is none left."""
        return next(iter(self._left()), None)

    def tell(self, tried: TriedPoint) -> None:
        """The result of a point, whoever proposed it."""
        self.told[tried.point] = tried

    def expected(self, point: Point) -> float:
        """The value that was expected before anything was measured, as a logarithm."""
        return 0.0

    def believed(self, points: Sequence[Point]) -> list[float]:
        """The believed value of measured points, as a logarithm over the start's."""
        return [self.told[point].value or 0.0 for point in points]

    def promise(self) -> float:
        """The most by which an untried point is expected to beat the best one, as a logarithm."""
        return math.inf

    def promising(self, count: int) -> list[Point]:
        """Untried points for a larger budget, the best one first."""
        point = self.ask()
        return [] if point is None else [point]

    def _left(self) -> list[Point]:
        return [p for p in self._points if p not in self.told and p != self.space.start]

    def _worst(self) -> float:
        """For a trial without a result: worse than all others."""
        values = (t.value for t in self.told.values() if t.value is not None)
        return min(values, default=0.0) - WORSE


class ForecastProposer(Proposer):
    """Forecast first, then what was learnt: hasten's own order."""

    def __init__(self, space: Space, prior: PriorKnowledge, seed: int = 0) -> None:
        super().__init__(space, seed, space.summit(prior.gain, seed))
        self._looked_at = set(self._points)
        self._known = prior
        self._speed = PlanGaussianProcess(space, prior.gain, prior.noise)
        self._memory = PlanGaussianProcess(space, self._peak_gain, 0.0, scales=PEAK_SCALES)

    def ask(self) -> Point | None:
        point = self._best_of(self._about())
        # Of a large space the points are a sample: the way up from the best of it leads on.
        while point is not None and (near := self._strangers(point)):
            better = self._best_of([point, *near])
            if better is None or better == point:
                break
            point = better
        return point

    def _about(self) -> list[Point]:
        """The untried points around the best point, while one of them promises a gain.

        Otherwise it returns all untried points. With a dozen choices, each is uncertain, and
        the sum of many promises most at the most uncertain points. A dozen trials learn more
        from points close to the best one (a trust region: Eriksson et al. 2019,
        arXiv:1910.01739).
        """
        better = [t.point for t in self.told.values() if t.value is not None and t.value > 0]
        if not better:
            return self._left()
        best = better[int(np.argmax(self.believed(better)))]
        self._strangers(best)
        untried = self._left()
        near = [p for p in untried if self.space.distance(p, best) <= CLOSE]
        promising = near and float(self._worth(near).max()) > PROMISING
        return near if promising else untried

    def _best_of(self, untried: Sequence[Point]) -> Point | None:
        """The most worth trying; None where there is none that can be dared."""
        if not untried:
            return None
        risk = self._risks(untried)
        fine = risk <= max(self._allowed, float(risk.min()))  # where all are doubtful, the least
        if risk.min() > LAST_RISK:
            return None
        # Per time, as Snoek, Larochelle and Adams (2012) have it for costs that differ.
        effort = np.array([self._known.effort(point) for point in untried])
        score = np.where(fine, self._worth(untried) * (1 - risk) / effort, -1.0)
        return untried[int(np.argmax(score))]

    def tell(self, tried: TriedPoint) -> None:
        super().tell(tried)
        self._looked_at.add(tried.point)
        # Of a value of three rounds, by the start's and by what differs within trials: fast points
        # have short turns, which stray more; and the start's was seen a few times alone.
        round_lists = [t.rounds for t in self.told.values() if len(t.rounds) > 1]
        free = sum(len(rounds) - 1 for rounds in round_lists)
        squares = (
            math.fsum((len(r) - 1) * statistics.variance(r) for r in round_lists) * OF_MEDIAN**2
        )
        self._speed.noise = math.sqrt((squares + BEFORE * self._known.noise**2) / (free + BEFORE))

    def expected(self, point: Point) -> float:
        return self._known.gain(point)

    def promise(self) -> float:
        untried = self._left()
        if not untried:
            return 0.0
        return float(
            np.where(self._risks(untried) <= self._allowed, self._worth(untried), 0.0).max()
        )

    def promising(self, count: int) -> list[Point]:
        """None of these differs from a better one in a single choice."""
        untried, chosen = self._left(), list[Point]()
        if not untried:
            return chosen
        risk = self._risks(untried)
        worth = np.where(risk <= self._allowed, self._worth(untried) * (1 - risk), 0.0)
        for index in np.argsort(-worth, kind="stable"):
            if len(chosen) == count or worth[index] <= 0:
                break
            if all(self.space.distance(untried[index], other) > 1 for other in chosen):
                chosen.append(untried[index])
        return chosen

    def believed(self, points: Sequence[Point]) -> list[float]:
        means: list[float] = self._speed.after(*self._measured())(points).mean.tolist()
        return means

    def _strangers(self, point: Point) -> list[Point]:
        """Neighbours that weren't looked at yet; from now on they are."""
        new = [p for p in self.space.neighbours(point) if p not in self._looked_at]
        self._looked_at.update(new)
        self._points += new
        return new

    @property
    def _allowed(self) -> float:
        failures = sum(t.state == "out of memory" for t in self.told.values())
        return CAREFUL[min(failures, len(CAREFUL) - 1)]

    def _worth(self, untried: Sequence[Point]) -> np.ndarray:
        measured, values, noises = self._measured()
        together = self._speed.after(measured, values, noises)([*untried, *measured])
        best = float(together.mean[len(untried) :].max())
        posterior = type(together)(
            together.mean[: len(untried)], together.deviation[: len(untried)]
        )
        worth: np.ndarray = expected_improvement(posterior, best)
        return worth

    def _measured(self) -> tuple[list[Point], list[float], list[float]]:
        """Points, their values, and how noisy each value is: the fewer rounds, the more.

        A failure that isn't one of memory counts as worse than all: the next points do without
        what they have in common with it.
        """
        usual = self._speed.noise
        tried_points = {self.space.start: TriedPoint(self.space.start, "ok", 0.0), **self.told}
        rows = []
        for t in tried_points.values():
            if t.state == "failed":
                rows.append((t.point, self._worst(), usual))
            elif t.value is not None:
                rows.append((t.point, t.value, usual * OF_ROUNDS.get(len(t.rounds), 1.0)))
        return [p for p, _, _ in rows], [v for _, v, _ in rows], [n for _, _, n in rows]

    def _risks(self, untried: Sequence[Point]) -> np.ndarray:
        """The chance of each point to exceed the limit."""
        limit, peaks = self._known.limit, {t.point: t.memory for t in self.told.values()}
        if limit is None or (self._known.memory is None and not any(peaks.values())):
            return np.zeros(len(untried))
        edge = math.log(limit)
        measured = [(point, math.log(peak)) for point, peak in peaks.items() if peak]
        gone = [t.point for t in self.told.values() if t.state == "out of memory"]
        measured += [(point, edge + BEYOND) for point in gone]
        # Over the start's peak: measured, else predicted, else the least seen.
        if first := peaks.get(self.space.start):
            offset = math.log(first)
        elif self._known.memory is not None:
            offset = math.log(self._known.memory(self.space.start))
        else:
            offset = min(math.log(peak) for peak in peaks.values() if peak)
        posterior = self._memory.after([p for p, _ in measured], [v - offset for _, v in measured])(
            untried
        )
        return 1 - normal_cdf((edge - offset - posterior.mean) / posterior.deviation)

    def _peak_gain(self, point: Point) -> float:
        """The predicted peak over the start's, as a logarithm."""
        memory = self._known.memory
        return 0.0 if memory is None else math.log(memory(point) / memory(self.space.start))


class Bandit(Proposer):
    """Each dimension a bandit of its own: reinforcement learning by Thompson's rule.

    Thompson (1933): a value is chosen as often as it is believed to be the best. What is
    believed of a value is the mean of its points' results, the more vague the fewer these are.
    """

    WIDTH = 0.15  # of a value that was never tried, as a logarithm

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space, seed)
        self._draw = random.Random(seed)
        self._results: dict[tuple[int, int], list[float]] = {}

    def ask(self) -> Point | None:
        for _ in range(200):
            point = self.space.canonical(
                tuple(self._pull(i, len(d.values)) for i, d in enumerate(self.space.dimensions))
            )
            is_tried = point in self.told or point == self.space.start
            if not is_tried and self.space.refuse(point) is None:
                return point
        return super().ask()

    def tell(self, tried: TriedPoint) -> None:
        super().tell(tried)
        value = tried.value if tried.value is not None else self._worst()
        for choice in enumerate(tried.point):
            self._results.setdefault(choice, []).append(value)

    def _pull(self, dimension: int, values: int) -> int:
        def drawn(value: int) -> float:
            outcomes = self._results.get((dimension, value), [])
            # a result of 0, the start's, stands beside them
            mean = sum(outcomes) / (len(outcomes) + 1)
            return self._draw.gauss(mean, self.WIDTH / math.sqrt(1 + len(outcomes)))

        return max(range(values), key=drawn)


POPULATION = 8  # of a generation: Optuna's 50 would be more than a study has trials
GP_STARTUP = 2  # trials before Optuna's process is asked: its 10 are most of a study
PATIENCE = 8  # suggestions that were tried before until one is drawn at random


class OptunaProposer(Proposer):
    """One of Optuna's samplers (Akiba et al. 2019), and its pruner for trainings.

    Every dimension is suggested, even if it has no effect, because the multivariate
    samplers need the same parameters in every trial. Numbers in rising order are integers,
    all others categories. CMA-ES has no categories: there all are integers. A point without
    a result is reported as worse than all others. A repeated point is reported with its
    earlier result.

    Args:
        name: tpe, gp, genetic or cmaes.
        space: the choices.
        seed: seed of the sampler.
        startup: number of random trials at the start, for tpe.
        pruner: the pruner that stops trainings.
    """

    def __init__(
        self,
        name: str,
        space: Space,
        seed: int = 0,
        startup: int = 10,
        pruner: optuna.pruners.BasePruner | None = None,
    ) -> None:
        import optuna

        super().__init__(space, seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        samplers, kinds = optuna.samplers, optuna.distributions
        make: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
            "tpe": lambda: samplers.TPESampler(
                multivariate=True, seed=seed, n_startup_trials=startup
            ),
            "gp": lambda: samplers.GPSampler(seed=seed, n_startup_trials=GP_STARTUP),
            "genetic": lambda: samplers.NSGAIISampler(population_size=POPULATION, seed=seed),
            "cmaes": lambda: samplers.CmaEsSampler(seed=seed),
        }
        with warnings.catch_warnings():  # "experimental": its effect is in the benchmark
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(
                direction="maximize", sampler=make[name](), pruner=pruner
            )
        self._kinds: dict[str, Any] = {
            d.name: kinds.IntDistribution(0, len(d.values) - 1)
            if d.ordered or name == "cmaes"
            else kinds.CategoricalDistribution(tuple(range(len(d.values))))
            for d in space.dimensions
        }
        self._open: dict[Point, optuna.trial.Trial] = {}

    def ask(self) -> Point | None:
        for _ in range(PATIENCE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = self._study.ask(self._kinds)
            point = self.space.canonical(tuple(trial.params[name] for name in self._kinds))
            if point in self.told:
                self._study.tell(trial, self._value(self.told[point]))
            elif self.space.refuse(point) is not None:
                self._study.tell(trial, self._worst())
            else:
                self._open[point] = trial
                return point
        fallback = super().ask()
        if fallback is not None:
            self._study.enqueue_trial(dict(zip(self._kinds, fallback, strict=True)))
            self._open[fallback] = self._study.ask(self._kinds)
        return fallback

    def tell(self, tried: TriedPoint) -> None:
        from optuna.trial import TrialState, create_trial

        super().tell(tried)
        trial = self._open.pop(tried.point, None)
        pruned = tried.state == "pruned"
        value = None if pruned else self._value(tried)
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        if trial is not None:
            self._study.tell(trial, value, state)
            return
        self._study.add_trial(
            create_trial(
                params=dict(zip(self._kinds, tried.point, strict=True)),
                distributions=self._kinds,
                value=value,
                state=state,
                intermediate_values=dict(enumerate(tried.curve, start=1)),
            )
        )

    def hopeless(self, point: Point, look: int, value: float) -> bool:
        """Returns True if the training of a proposed point should stop after this evaluation."""
        trial = self._open[point]
        trial.report(value, look)
        return trial.should_prune()

    def _value(self, tried: TriedPoint) -> float:
        return tried.value if tried.value is not None else self._worst()


Sampler = Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"]


def proposer_of(name: str, space: Space, prior: PriorKnowledge, seed: int = 0) -> Proposer:
    """The proposer of a name."""
    if name == "auto":
        return ForecastProposer(space, prior, seed)
    if name == "random":
        return Proposer(space, seed)
    if name == "bandit":
        return Bandit(space, seed)
    return OptunaProposer(name, space, seed)
