"""Proposers choose the points that a study measures next.

A proposer never proposes a point twice, nor one that the space refuses:

- `Proposer`: every point once, in a random order
- `ForecastProposer` (`auto`): the best point by the techniques' forecasts, which are
  corrected by measurements of points with the same choices
- `OptunaProposer`: a sampler of Optuna, which begins with the forecasts' best point
- `Bandit`: Thompson's rule for each decision
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hasten.tune.space import Point, Space

# Permitted probability that a point runs out of memory, after 0, 1, 2 trials that did.
MOST_RISK = (0.3, 0.02, 0.001)
LAST_RISK = 0.25  # permitted probability for the safest point, if all points are riskier
# Prior standard deviations of one choice's contribution to the logarithm of the value.
CHOICES = (0.01, 0.03, 0.1, 0.3)
TRUST = 0.5  # prior standard deviation of the forecast's weight, around its mean of 1
ERROR = 0.03  # standard deviation of a value from the sum of contributions, as a logarithm
PEAK_CHOICES, PEAK_ERROR = (0.05, 0.2, 0.6), 0.03  # CHOICES and ERROR for the peak of memory
BEYOND = 0.15  # assumed logarithm of peak over limit, if memory ran out
WORSE = 0.2  # assumed distance of a failed trial below all results, as a logarithm
State = Literal["ok", "out of memory", "failed"]


@dataclass(frozen=True)
class TriedPoint:
    """A tried point; ``score`` is the logarithm of its value over the start's, more is better."""

    point: Point
    state: State
    score: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class PriorKnowledge:
    """Predictions for a job before any measurement.

    Args:
        gain: expected logarithm of the value over the start's.
        memory: expected peak in bytes; None if unknown.
        limit: limit of that peak; None: no relevant limit.
        noise: standard deviation of one value, as a logarithm.
    """

    gain: Callable[[Point], float] = lambda point: 0.0
    memory: Callable[[Point], float] | None = None
    limit: float | None = None
    noise: float = 0.02


class Proposer:
    """Proposes every point once, in an order that the seed determines."""

    def __init__(self, space: Space, seed: int = 0, *more: Point) -> None:
        self.space = space
        self.results: dict[Point, TriedPoint] = {}
        self.proposed: set[Point] = {space.start}
        self._points = list(dict.fromkeys((*space.points(seed), *more)))
        random.Random(seed).shuffle(self._points)

    def ask(self) -> Point | None:
        """Returns the next point; None if all were proposed."""
        point = self._next()
        if point is not None:
            self.proposed.add(point)
        return point

    def tell(self, tried: TriedPoint) -> None:
        """Receives the result of a point, even of one that the proposer hasn't proposed."""
        self.results[tried.point] = tried
        self.proposed.add(tried.point)

    def _next(self) -> Point | None:
        return next(iter(self._unproposed()), None)

    def _unproposed(self) -> list[Point]:
        return [p for p in self._points if p not in self.proposed]

    def _score(self, tried: TriedPoint) -> float:
        """Returns the trial's value; for a failed trial, a value below all others."""
        if tried.score is not None:
            return tried.score
        values = (t.score for t in self.results.values() if t.score is not None)
        return min(values, default=0.0) - WORSE


class ForecastProposer(Proposer):
    """Proposes the point with the largest expected improvement that fits into memory.

    The model of a score is a weighted forecast plus a contribution of each choice. Weight and
    contributions are fitted to all measurements by Bayesian linear regression (Bishop,
    Pattern Recognition and Machine Learning, 2006, section 3.3).
    """

    def __init__(self, space: Space, prior: PriorKnowledge, seed: int = 0) -> None:
        super().__init__(space, seed, space.summit(prior.gain, seed))
        self._prior, self._known_points = prior, set(self._points)

    def _next(self) -> Point | None:
        best = max(self.results.values(), key=self._score, default=None)
        if best is not None:
            self._neighbours(best.point)
        point = self._best_of(self._unproposed())
        while point is not None and (near := self._neighbours(point)):
            better = self._best_of([point, *near])  # large spaces are only sampled at first
            if better is None or better == point:
                break
            point = better
        return point

    def _neighbours(self, point: Point) -> list[Point]:
        """Adds the new neighbours of a point to the known points, and returns them."""
        new = [p for p in self.space.neighbours(point) if p not in self._known_points]
        self._known_points.update(new)
        self._points += new
        return new

    def _best_of(self, points: Sequence[Point]) -> Point | None:
        """Returns the point with the largest expected improvement; None if all are too risky."""
        failures = sum(t.state == "out of memory" for t in self.results.values())
        most_risk, risks = MOST_RISK[min(failures, len(MOST_RISK) - 1)], self._risks(points)
        most_risk = max(most_risk, min(*risks, LAST_RISK, 1.0))  # permits the safest point
        points = [p for p, risk in zip(points, risks, strict=True) if risk <= most_risk]
        if not points:
            return None
        values = {
            t.point: self._score(t) for t in self.results.values() if t.state != "out of memory"
        } or {self.space.start: 0.0}
        mean, deviation = self._predicted(
            [*points, *values], self._prior.gain, values, CHOICES, max(self._prior.noise, ERROR)
        )
        count = len(points)
        distance = (mean[:count] - mean[count:].max()) / deviation[:count]
        density = np.exp(-0.5 * distance**2) / math.sqrt(2 * math.pi)
        improvement = deviation[:count] * (distance * _normal_cdf(distance) + density)
        return points[int(np.argmax(improvement))]

    def _risks(self, points: Sequence[Point]) -> Sequence[float]:
        """Returns the probability that each point exceeds the memory limit."""
        memory, limit, start = self._prior.memory, self._prior.limit, self.space.start
        if limit is None or not points:
            return [0.0] * len(points)
        peaks = {t.point: math.log(t.memory) for t in self.results.values() if t.memory}
        out_of_memory = (t.point for t in self.results.values() if t.state == "out of memory")
        peaks |= dict.fromkeys(out_of_memory, math.log(limit) + BEYOND)
        if memory is None and start not in peaks:
            return [0.0] * len(points)
        offset = peaks.get(start, 0.0) if memory is None else math.log(memory(start))
        mean, deviation = self._predicted(
            points,
            lambda p: 0.0 if memory is None else math.log(memory(p)) - offset,
            {p: peak - offset for p, peak in peaks.items()},
            PEAK_CHOICES,
            PEAK_ERROR,
        )
        risks: list[float] = _normal_cdf((mean + offset - math.log(limit)) / deviation).tolist()
        return risks

    def _predicted(
        self,
        points: Sequence[Point],
        forecast: Callable[[Point], float],
        measured: dict[Point, float],
        scales: Sequence[float],
        error: float,
    ) -> tuple[Any, Any]:
        """Returns the posterior mean and standard deviation of points, given measurements.

        ``scales`` are prior standard deviations of a contribution. The results of all scales
        are averaged, weighted by the likelihood of the measurements.
        """
        every, count = [*points, *measured], len(points)
        rows, forecasts = self._choices(every), np.array([forecast(p) for p in every])
        residuals = np.array(list(measured.values())) - forecasts[count:]
        shared_choices = rows @ rows[count:].T
        trust = TRUST**2 * np.outer(forecasts, forecasts[count:])
        parts = []
        for scale in scales:
            covariance = scale**2 * shared_choices + trust
            lower = np.linalg.cholesky(covariance[count:] + error**2 * np.eye(len(residuals)))
            solved = np.linalg.solve(lower, residuals)
            half = np.linalg.solve(lower, covariance[:count].T)
            prior = scale**2 * rows[:count].sum(1) + (TRUST * forecasts[:count]) ** 2
            mean = forecasts[:count] + half.T @ solved
            likelihood = -0.5 * solved @ solved - np.log(np.diag(lower)).sum()
            parts.append((likelihood, mean, np.maximum(prior - (half**2).sum(0), 0.0)))
        likelihoods, means, variances = (np.stack(column) for column in zip(*parts, strict=True))
        weights = np.exp(likelihoods - likelihoods.max())
        weights /= weights.sum()
        mean = weights @ means
        variance = weights @ (variances + means**2) - mean**2
        return mean, np.sqrt(np.maximum(variance, 0.0) + error**2)

    def _choices(self, points: Sequence[Point]) -> Any:
        """Returns a row of zeros and ones for each point: its choices."""
        widths = [len(d.values) for d in self.space.dimensions]
        first = np.cumsum([0, *widths[:-1]])
        rows = np.zeros((len(points), sum(widths)))
        for row, point in zip(rows, points, strict=True):
            active = np.array(self.space.active(point))
            row[(first + point)[active]] = 1.0
        return rows


def _normal_cdf(z: Any) -> Any:
    from scipy.special import ndtr

    return ndtr(z)


class Bandit(Proposer):
    """Thompson sampling, with a separate bandit for each dimension.

    Thompson (1933): a choice is drawn with the probability that it is the best. Its value has a
    normal distribution: the mean of its results, with a width that falls with their number.
    """

    WIDTH = 0.15  # standard deviation of a choice that was never tried, as a logarithm

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space, seed)
        self._draw = random.Random(seed)

    def _next(self) -> Point | None:
        for _ in range(200):
            point = self.space.canonical(
                tuple(self._pull(i, len(d.values)) for i, d in enumerate(self.space.dimensions))
            )
            if point not in self.proposed and self.space.refuse(point) is None:
                return point
        return super()._next()

    def _pull(self, dimension: int, values: int) -> int:
        def drawn(choice: int) -> float:
            tried = [t for t in self.results.values() if t.point[dimension] == choice]
            mean = math.fsum(map(self._score, tried)) / (len(tried) + 1)  # plus one result of 0
            return self._draw.gauss(mean, self.WIDTH / math.sqrt(1 + len(tried)))

        return max(range(values), key=drawn)


POPULATION = 8  # points of a generation; Optuna's default of 50 exceeds a study's trials
GP_STARTUP = 2  # random trials before the Gaussian process; Optuna's 10 would be most of a study
PATIENCE = 8  # unusable suggestions of Optuna before the next random point is used


class OptunaProposer(Proposer):
    """A sampler of Optuna (Akiba et al. 2019); the best forecast is its first point.

    Optuna suggests every dimension, even one without effect, because the multivariate
    samplers need the same parameters in every trial. Dimensions with rising numbers are
    integers, all others categories. CMA-ES has no categories, so all are integers for it. A
    point without a result is reported as worse than all others.

    Args:
        name: tpe, gp, genetic or cmaes.
        space: the choices.
        seed: seed of the sampler.
        first: points to propose first.
    """

    def __init__(self, name: str, space: Space, seed: int = 0, *first: Point) -> None:
        import optuna

        super().__init__(space, seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        samplers, kinds = optuna.samplers, optuna.distributions
        make: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
            "tpe": lambda: samplers.TPESampler(multivariate=True, seed=seed),
            "gp": lambda: samplers.GPSampler(seed=seed, n_startup_trials=GP_STARTUP),
            "genetic": lambda: samplers.NSGAIISampler(population_size=POPULATION, seed=seed),
            "cmaes": lambda: samplers.CmaEsSampler(seed=seed),
        }
        with warnings.catch_warnings():  # Optuna calls some samplers experimental
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(direction="maximize", sampler=make[name]())
        self._kinds: dict[str, Any] = {
            d.name: kinds.IntDistribution(0, len(d.values) - 1)
            if d.ordered or name == "cmaes"
            else kinds.CategoricalDistribution(tuple(range(len(d.values))))
            for d in space.dimensions
        }
        self._open: dict[Point, optuna.trial.Trial] = {}
        for point in first:
            self._study.enqueue_trial(dict(zip(self._kinds, point, strict=True)))

    def _next(self) -> Point | None:
        for attempt in itertools.count():
            if attempt == PATIENCE:
                if (point := super()._next()) is None:
                    return None
                self._study.enqueue_trial(dict(zip(self._kinds, point, strict=True)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial = self._study.ask(self._kinds)
            point = self.space.canonical(tuple(trial.params[name] for name in self._kinds))
            if point not in self.proposed and self.space.refuse(point) is None:
                self._open[point] = trial
                return point
            refused = TriedPoint(point, "failed")
            self._study.tell(trial, self._score(self.results.get(point, refused)))
        raise AssertionError

    def tell(self, tried: TriedPoint) -> None:
        from optuna.trial import create_trial

        super().tell(tried)
        score = self._score(tried)
        if (trial := self._open.pop(tried.point, None)) is not None:
            self._study.tell(trial, score)
            return
        params = dict(zip(self._kinds, tried.point, strict=True))
        self._study.add_trial(create_trial(params=params, distributions=self._kinds, value=score))


Sampler = Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"]


def proposer_of(name: str, space: Space, prior: PriorKnowledge, seed: int = 0) -> Proposer:
    """Returns the proposer of this name."""
    if name == "auto":
        return ForecastProposer(space, prior, seed)
    if name == "random":
        return Proposer(space, seed)
    if name == "bandit":
        return Bandit(space, seed)
    return OptunaProposer(name, space, seed, space.summit(prior.gain, seed))
