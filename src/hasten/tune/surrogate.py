"""Predicts the values of points that weren't measured.

The model is a Gaussian process over the choices. The logarithm of a point's value is
its forecast, plus a contribution of every choice, plus a smaller one of every pair of
choices. The sizes of these contributions are selected by the likelihood of the
measurements (Duvenaud, Nickisch and Rasmussen 2011, "Additive Gaussian Processes"). Two
trials that share a choice therefore inform each other, and ten trials can order a few
hundred points. The reliability of the forecast is learnt in the same way, by a weight
for it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.tune.space import Point, Space

Array = NDArray[np.float64]
NEAR = 0.6  # likeness of neighbours in an ordered dimension; two apart 0.36
SCALES = (0.01, 0.03, 0.1, 0.3)  # of a choice's contribution, as a logarithm
USUAL, SPREAD = 0.2, 0.7  # of that scale before any trial: its median, its own logarithm's spread
NEGLIGIBLE = 0.02  # share of the likeliest scales, below which others aren't asked
KNOB = 0.3  # a knob's contribution, as a share of that of a technique it belongs to
PAIRS = (0.15, 0.4, 0.8)  # of a pair's, as a share of the former
APARTS = (0.01, 0.03, 0.08)
TRUST = 0.5  # in the forecast: its weight is 1, give or take this


@dataclass(frozen=True)
class Posterior:
    """Mean and standard deviation of the points asked for."""

    mean: Array
    deviation: Array


class PlanGaussianProcess:
    """A process over the points of a space.

    Args:
        space: its points.
        forecast: of a point's value beforehand, as a logarithm; 0 where nothing is known.
        noise: standard deviation of one measurement, as a logarithm.
        aparts: considered standard deviations of what is a point's own, no sum of its choices.
        scales: considered standard deviations of a choice's contribution.
    """

    def __init__(
        self,
        space: Space,
        forecast: Callable[[Point], float] = lambda point: 0.0,
        noise: float = 0.02,
        aparts: Sequence[float] = APARTS,
        scales: Sequence[float] = SCALES,
    ) -> None:
        self._space, self._forecast = space, forecast
        self.noise, self._aparts, self._scales = max(noise, 1e-3), aparts, scales
        self._known: dict[Point, tuple[Array, float]] = {}
        weights = np.array([KNOB**2 if d.needs else 1.0 for d in space.dimensions])
        self._weights: Array = weights
        self._single = weights.sum()  # over choices, and over pairs of them
        self._pairs = (self._single**2 - (weights**2).sum()) / 2

    def after(
        self,
        measured: Sequence[Point],
        values: Sequence[float],
        noises: Sequence[float] | None = None,
    ) -> Callable[[Sequence[Point]], Posterior]:
        """A function that predicts any points after these measurements.

        Args:
            measured: measured points; a point may occur several times.
            values: their values.
            noises: noise of each value; default: the usual noise.
        """
        if not measured:
            return self._vague
        rows, before = self._levels(measured)
        residuals = np.asarray(values, dtype=np.float64) - before
        alike_ss = self._alike(rows, rows)
        deviations = np.full(len(residuals), self.noise) if noises is None else np.asarray(noises)
        ways = list(itertools.product(self._scales, PAIRS, self._aparts))
        trusted = TRUST**2 * np.outer(before, before)
        fits = [
            self._fit(_mixed(*alike_ss, *way[:2]) + trusted, residuals, deviations**2 + way[2] ** 2)
            for way in ways
        ]
        usual = [-0.5 * (math.log(way[0] / USUAL) / SPREAD) ** 2 for way in ways]
        logs = np.array([fit[0] + more for fit, more in zip(fits, usual, strict=True)])
        shares = np.exp(logs - logs.max())
        likely = [i for i, share in enumerate(shares) if share > NEGLIGIBLE]

        def believed(wanted: Sequence[Point]) -> Posterior:
            levels, first = self._levels(wanted)
            alike = self._alike(levels, rows)
            total, mean, square = 0.0, np.zeros(len(first)), np.zeros(len(first))
            for i in likely:
                scale, share, extra_noise = ways[i]
                _, lower, solved = fits[i]
                across = _mixed(*alike, scale, share) + TRUST**2 * np.outer(first, before)
                half = np.linalg.solve(lower, across.T)  # (seen, wanted)
                prior = _mixed(self._single, self._pairs, scale, share)
                spread: Array = prior + TRUST**2 * first**2
                variance = np.maximum(spread - (half**2).sum(0), 0.0) + extra_noise**2
                middle = first + half.T @ solved
                total += shares[i]
                mean += shares[i] * middle
                square += shares[i] * (variance + middle**2)
            mean /= total
            return Posterior(mean, np.sqrt(np.maximum(square / total - mean**2, 0.0)))

        return believed

    def _vague(self, wanted: Sequence[Point]) -> Posterior:
        """Before any measurement: the forecast, give or take much."""
        _, first = self._levels(wanted)
        middle = self._scales[len(self._scales) // 2]
        width = math.hypot(middle * math.sqrt(self._single), self._aparts[-1])
        return Posterior(first, np.full(len(wanted), width))

    def _fit(self, covariance: Array, residuals: Array, variances: Array) -> tuple[float, Any, Any]:
        """Log likelihood of the measurements, and what a prediction needs of them."""
        lower = np.linalg.cholesky(covariance + np.diag(variances))
        solved = np.linalg.solve(lower, residuals)
        likelihood = -0.5 * float(solved @ solved) - float(np.log(np.diag(lower)).sum())
        return likelihood, lower, solved

    def _levels(self, points: Sequence[Point]) -> tuple[Array, Array]:
        """Indices with -1 where a dimension doesn't matter, (points, dimensions); forecasts."""
        for p in points:
            if p not in self._known:
                marks = zip(p, self._space.active(p), strict=True)
                row = np.array([i if on else -1 for i, on in marks], dtype=np.float64)
                self._known[p] = (row, self._forecast(p))
        rows = [self._known[p] for p in points]
        return np.stack([r for r, _ in rows]), np.array([f for _, f in rows], dtype=np.float64)

    def _alike(self, one: Array, two: Array) -> tuple[Array, Array]:
        """Sum over choices of their likeness, and sum over pairs of the products."""
        total = np.zeros((len(one), len(two)))
        squares = np.zeros_like(total)
        for index, d in enumerate(self._space.dimensions):
            a, b = one[:, index][:, None], two[:, index][None, :]
            same = (a == b).astype(np.float64)
            if d.ordered:
                both = (a >= 0) & (b >= 0)
                same = np.where(both, NEAR ** np.abs(a - b), same)
            same *= self._weights[index]
            total += same
            squares += same**2
        return total, (total**2 - squares) / 2


def _mixed(single: Array, pairs: Array, scale: float, share: float) -> Array:
    return scale**2 * (single + share**2 * pairs)


def expected_improvement(posterior: Posterior, best: float) -> Array:
    """By how much a point is expected to beat ``best`` (Jones, Schonlau and Welch 1998)."""
    distance = (posterior.mean - best) / posterior.deviation
    density = np.exp(-0.5 * distance**2) / math.sqrt(2 * math.pi)
    return posterior.deviation * (distance * normal_cdf(distance) + density)


def normal_cdf(z: Array) -> Array:
    """The normal distribution function."""
    from scipy.special import ndtr

    probabilities: Array = ndtr(z)
    return probabilities


def importance(
    space: Space, measured: Sequence[tuple[Point, float]], noise: float
) -> dict[str, float]:
    """How much each decision moves the believed value: the spread of its values' means, a share.

    Args:
        measured: points with their values, as logarithms.
        noise: see `PlanGaussianProcess`.
    """
    points = space.points()
    process = PlanGaussianProcess(space, noise=noise)
    believed = process.after([p for p, _ in measured], [v for _, v in measured])(points).mean
    spreads: dict[str, float] = {}
    for index, d in enumerate(space.dimensions):
        groups: dict[int, list[float]] = {}
        for point, value in zip(points, believed.tolist(), strict=True):
            if space.active(point)[index]:
                groups.setdefault(point[index], []).append(value)
        middle = [statistics.fmean(g) for g in groups.values()]
        spreads[d.name] = max(middle) - min(middle) if middle else 0.0
    total = math.fsum(spreads.values()) or 1.0
    shares = {name: round(s / total, 4) for name, s in spreads.items()}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))
