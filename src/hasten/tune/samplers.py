"""Proposers, which say what is tried next: hasten's own order, by chance, a bandit, or Optuna's.

A proposer is asked for a point and told what came of it. It never proposes a point twice, nor one
that the space refuses, nor one that ran out of memory. `auto` is hasten's own:

  1. the first trials follow the forecast: the best point that it sees within memory
  2. every result corrects the model (`surrogate.PlanGaussianProcess`), and of the points around the
     best one that is tried from which most is expected; memory is predicted in the same way, from
     the peaks that were seen, and what is likely to exceed it isn't tried
  3. each trial that ran out of memory all the same makes the next ones more careful
  4. of what failed otherwise the cause is looked for (`surrogate.Failures`), and points that may
     share it count for less
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.tune.bench import State
from hasten.tune.space import Point, Space
from hasten.tune.surrogate import Failures, PlanGaussianProcess, expected_improvement, normal_cdf

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


@dataclass(frozen=True)
class TriedPoint:
    """What came of a point: the logarithm of its value over the start's, more is better.

    ``blamed`` is the choice that a failure's message names; ``rounds`` are the logarithms of which
    the value is the median.
    """

    point: Point
    state: State
    value: float | None = None
    memory: float | None = None
    blamed: str | None = None
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class PriorKnowledge:
    """What is known of a job before anything is measured.

    Args:
        gain: expected logarithm of the value over the start's.
        memory: expected peak in bytes; None where nobody knows.
        limit: of that peak; None: there is none worth minding.
        noise: standard deviation of one measurement, as a logarithm.
        effort: time that a point's trial takes beside measuring, over the least there is; it may
            change from trial to trial.
    """

    gain: Callable[[Point], float] = lambda point: 0.0
    memory: Callable[[Point], float] | None = None
    limit: float | None = None
    noise: float = 0.02
    effort: Callable[[Point], float] = lambda point: 1.0


class Proposer(Protocol):
    """Asked and told in turns."""

    def ask(self) -> Point | None:
        """The next point; None when there is none left."""

    def tell(self, tried: TriedPoint) -> None:
        """What came of a point, whoever proposed it."""


class ForecastProposer:
    """Forecast first, then what was learnt: hasten's own order.

    Args:
        space: what may be chosen.
        known: beforehand.
        seed: of the choice among equals.
    """

    def __init__(self, space: Space, known: PriorKnowledge, seed: int = 0) -> None:
        self._points = list(dict.fromkeys((*space.points(seed), space.summit(known.gain, seed))))
        random.Random(seed).shuffle(self._points)
        self._looked_at = set(self._points)
        self._space, self._start, self._known = space, space.start, known
        self._speed = PlanGaussianProcess(space, known.gain, known.noise)
        relative = self._relative(known)
        self._memory = PlanGaussianProcess(space, relative, 0.0, scales=PEAK_SCALES)
        self._failures = Failures(space)
        self.history: list[TriedPoint] = []

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
        """What is left around the best point, as long as something is to be expected there.

        Of a dozen choices each is vaguely known, so that the sum of many promises most where least
        is known; a dozen trials learn more of what is close to the best one (a trust region:
        Eriksson et al. 2019, arXiv:1910.01739).
        """
        better = [t.point for t in self.history if t.value is not None and t.value > 0]
        if not better:
            return self._left()
        best = better[int(np.argmax(self.believed(better)))]
        self._strangers(best)
        left = self._left()
        near = [p for p in left if self._space.apart(p, best) <= CLOSE]
        promising = near and float(self._worth(near).max()) > PROMISING
        return near if promising else left

    def _best_of(self, left: Sequence[Point]) -> Point | None:
        """The most worth trying; None where there is none that can be dared."""
        if not left:
            return None
        risk = self._risks(left)
        worth = self._worth(left)
        fine = risk <= max(self._allowed, float(risk.min()))  # where all are doubtful, the least
        if risk.min() > LAST_RISK:
            return None
        # Per time, as Snoek, Larochelle and Adams (2012) have it for costs that differ.
        effort = np.array([self._known.effort(point) for point in left])
        score = np.where(fine, worth * (1 - risk) / effort, -1.0)
        return left[int(np.argmax(score))]

    def tell(self, tried: TriedPoint) -> None:
        self.history.append(tried)
        self._looked_at.add(tried.point)
        if tried.state == "ok":
            self._failures.worked(tried.point)
            self._speed.noise = self._noise()
        elif tried.state == "failed":
            self._failures.failed(tried.point, tried.blamed)

    def promise(self) -> float:
        """The most by which an untried point is expected to beat the best one, as a logarithm."""
        left = self._left()
        if not left:
            return 0.0
        worth = np.where(self._risks(left) <= self._allowed, self._worth(left), 0.0)
        return float(worth.max())

    def promising(self, count: int) -> list[Point]:
        """The untried points of which most is expected, the best one first.

        Of those that differ from a better one in a single choice none is among them.
        """
        left, found = self._left(), list[Point]()
        if not left:
            return found
        risk = self._risks(left)
        worth = np.where(risk <= self._allowed, self._worth(left) * (1 - risk), 0.0)
        for place in np.argsort(-worth, kind="stable"):
            if len(found) == count or worth[place] <= 0:
                break
            if all(self._space.apart(left[place], other) > 1 for other in found):
                found.append(left[place])
        return found

    def expected(self, point: Point) -> float:
        """What was expected of a point before anything was measured, as such a logarithm."""
        return self._known.gain(point)

    def believed(self, points: Sequence[Point]) -> list[float]:
        """What is believed of each point's value, as a logarithm over the start's."""
        seen, values, noises = self._measured()
        found: list[float] = self._speed.at(points, seen, values, noises).mean.tolist()
        return found

    def _noise(self) -> float:
        """Of a value of three rounds, by the start's and by what differs within trials.

        Fast points have short turns, which stray more; and the start's was seen a few times alone.
        """
        known = [t.rounds for t in self.history if len(t.rounds) > 1]
        free = sum(len(rounds) - 1 for rounds in known)
        squares = math.fsum((len(r) - 1) * statistics.variance(r) for r in known) * OF_MEDIAN**2
        return math.sqrt((squares + BEFORE * self._known.noise**2) / (free + BEFORE))

    def _strangers(self, point: Point) -> list[Point]:
        """Neighbours that weren't looked at yet; from now on they are."""
        new = [p for p in self._space.neighbours(point) if p not in self._looked_at]
        self._looked_at.update(new)
        self._points += new
        return new

    def _left(self) -> list[Point]:
        done = {t.point for t in self.history} | {self._start}
        return [p for p in self._points if p not in done]

    @property
    def _allowed(self) -> float:
        failures = sum(t.state == "out of memory" for t in self.history)
        return CAREFUL[min(failures, len(CAREFUL) - 1)]

    def _worth(self, left: Sequence[Point]) -> np.ndarray:
        seen, values, noises = self._measured()
        together = self._speed.at([*left, *seen], seen, values, noises)
        best = float(together.mean[len(left) :].max())
        found = type(together)(together.mean[: len(left)], together.deviation[: len(left)])
        worth: np.ndarray = expected_improvement(found, best)
        return worth * (1 - self._failures.chances(left))

    def _measured(self) -> tuple[list[Point], list[float], list[float]]:
        """Points, their values, and how noisy each value is: the fewer rounds, the more."""
        usual = self._speed.noise
        rows = [(self._start, 0.0, usual)] * all(t.point != self._start for t in self.history)
        rows += [
            (t.point, t.value, usual * OF_ROUNDS.get(len(t.rounds), 1.0))
            for t in self.history
            if t.value is not None
        ]
        return [p for p, _, _ in rows], [v for _, v, _ in rows], [n for _, _, n in rows]

    def _risks(self, left: Sequence[Point]) -> np.ndarray:
        """The chance of each point to exceed the limit."""
        limit = self._known.limit
        if limit is None:
            return np.zeros(len(left))
        seen = [(t.point, math.log(t.memory)) for t in self.history if t.memory]
        edge = math.log(limit)
        seen += [(t.point, edge + BEYOND) for t in self.history if t.state == "out of memory"]
        if self._known.memory is None and not any(t.memory for t in self.history):
            return np.zeros(len(left))
        offset = self._offset
        found = self._memory.at(left, [p for p, _ in seen], [v - offset for _, v in seen])
        return 1 - normal_cdf((edge - offset - found.mean) / found.deviation)

    def _relative(self, known: PriorKnowledge) -> Callable[[Point], float]:
        """The predicted peak over the start's, as a logarithm."""
        memory = known.memory
        if memory is None:
            return lambda point: 0.0
        first = math.log(memory(self._start))
        return lambda point: math.log(memory(point)) - first

    @property
    def _offset(self) -> float:
        """The logarithm of the start's peak: measured, else predicted, else the least seen."""
        for t in self.history:
            if t.point == self._start and t.memory:
                return math.log(t.memory)
        if self._known.memory is not None:
            return math.log(self._known.memory(self._start))
        return min((math.log(t.memory) for t in self.history if t.memory), default=0.0)


# Proposers that know nothing beforehand: an order by chance, and a bandit for each dimension.


class Shuffled:
    """Every point once, in an order drawn by the seed."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._points = [p for p in space.points(seed) if p != space.start]
        random.Random(seed).shuffle(self._points)
        self._done: set[Point] = set()

    def ask(self) -> Point | None:
        return next((p for p in self._points if p not in self._done), None)

    def tell(self, tried: TriedPoint) -> None:
        self._done.add(tried.point)


class Bandit:
    """Each dimension a bandit of its own: values are drawn by Thompson's rule.

    Thompson (1933): a value is chosen as often as it is believed to be the best. What is
    believed of a value is the mean of its points' results, the more vague the fewer these are.
    """

    WIDTH = 0.15  # of a value that was never tried, as a logarithm

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._space, self._draw = space, random.Random(seed)
        self._results: dict[tuple[int, int], list[float]] = {}
        self._done: set[Point] = {space.start}
        self._rest = Shuffled(space, seed)
        self._worst = 0.0

    def ask(self) -> Point | None:
        for _ in range(200):
            point = self._space.canonical(
                tuple(self._pull(i, len(d.values)) for i, d in enumerate(self._space.dimensions))
            )
            if point not in self._done and self._space.refuse(point) is None:
                return point
        return self._rest.ask()

    def tell(self, tried: TriedPoint) -> None:
        self._done.add(tried.point)
        self._rest.tell(tried)
        self._worst = min(self._worst, tried.value or 0.0)
        value = tried.value if tried.value is not None else self._worst - 0.1
        for place in enumerate(tried.point):
            self._results.setdefault(place, []).append(value)

    def _pull(self, dimension: int, values: int) -> int:
        def drawn(value: int) -> float:
            seen = self._results.get((dimension, value), [])
            mean = sum(seen) / (len(seen) + 1)  # a result of 0, the start's, stands beside them
            return self._draw.gauss(mean, self.WIDTH / math.sqrt(1 + len(seen)))

        return max(range(values), key=drawn)


# Optuna's samplers as proposers: TPE, Gaussian processes, NSGA-II, CMA-ES.
#
# Optuna 5 (Akiba et al. 2019). Every dimension is suggested, whether it matters or not, since the
# multivariate samplers want the same parameters in every trial; numbers in rising order are
# integers, all others categories (CMA-ES has none: there all are integers). A point that was
# refused, ran out of memory or failed is told as worse than all others; one that comes twice is
# told as before.

NAMES = ("tpe", "gp", "genetic", "cmaes")
POPULATION = 8  # of a generation: Optuna's 50 would be more than a study has trials
PATIENCE = 8  # suggestions that were tried before until one is drawn at random


def missing(name: str) -> str | None:
    """The library that a sampler needs and that isn't installed."""
    needs = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}.get(name, ())
    return next((n for n in needs if importlib.util.find_spec(n) is None), None)


class OptunaProposer:
    """One of Optuna's samplers.

    Args:
        name: of `NAMES`.
        space: what may be chosen.
        seed: of the sampler.
    """

    def __init__(self, name: str, space: Space, seed: int = 0) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._space = optuna, space
        self._numbers = name == "cmaes"
        with warnings.catch_warnings():  # "experimental": its effect is in the benchmark
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(direction="maximize", sampler=_sampler(name, seed))
        self._rest = Shuffled(space, seed)
        self._told: dict[Point, TriedPoint] = {}
        self._open: dict[Point, optuna.trial.Trial] = {}

    def ask(self) -> Point | None:
        for _ in range(PATIENCE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = self._study.ask(self._distributions())
            point = self._space.canonical(tuple(trial.params[d.name] for d in self._dimensions))
            if point in self._told:
                self._study.tell(trial, self._value(self._told[point]))
            elif self._space.refuse(point) is not None:
                self._study.tell(trial, self._worst())
            else:
                self._open[point] = trial
                return point
        return self._rest.ask()

    def tell(self, tried: TriedPoint) -> None:
        self._told[tried.point] = tried
        self._rest.tell(tried)
        trial = self._open.pop(tried.point, None)
        if trial is not None:
            self._study.tell(trial, self._value(tried))
            return
        params = {d.name: i for d, i in zip(self._dimensions, tried.point, strict=True)}
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=params, distributions=self._distributions(), value=self._value(tried)
            )
        )

    @property
    def _dimensions(self) -> Any:
        return self._space.dimensions

    def _distributions(self) -> dict[str, Any]:
        kinds = self._optuna.distributions
        found: dict[str, Any] = {}
        for d in self._dimensions:
            number = d.ordered or self._numbers
            last = len(d.values) - 1
            found[d.name] = (
                kinds.IntDistribution(0, last)
                if number
                else kinds.CategoricalDistribution(tuple(range(last + 1)))
            )
        return found

    def _value(self, tried: TriedPoint) -> float:
        return tried.value if tried.value is not None else self._worst()

    def _worst(self) -> float:
        return min((t.value for t in self._told.values() if t.value is not None), default=0.0) - 0.1


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    from optuna import samplers

    if name == "tpe":
        return samplers.TPESampler(multivariate=True, seed=seed)
    if name == "gp":
        return samplers.GPSampler(seed=seed)
    if name == "genetic":
        return samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    return samplers.CmaEsSampler(seed=seed)


# Which proposer a name stands for, and what is taken instead where its library isn't there.

Sampler = Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"]


def check_sampler(name: str) -> None:
    """Refuse a sampler that nobody knows.

    Raises:
        InputError: with the nearest known one.
    """
    known = get_args(Sampler)
    if name not in known:
        raise InputError(
            f"sampler: there is no {name!r}{did_you_mean(name, known)}; there are "
            f"{', '.join(known)}"
        )


def proposer_of(
    name: str,
    space: Space,
    known: PriorKnowledge,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Proposer:
    """The proposer of a name; TPE, with a word, where its library is missing."""
    check_sampler(name)
    if name == "auto":
        return ForecastProposer(space, known, seed)
    if name == "random":
        return Shuffled(space, seed)
    if name == "bandit":
        return Bandit(space, seed)
    library = missing(name)
    if library is not None:
        tell(f"sampler: {name} needs {library}, which isn't installed; going on with tpe")
        name = "tpe"
    return OptunaProposer(name, space, seed)
