"""What is believed of points that weren't measured: by results, failures and earlier studies.

The belief is a Gaussian process over the choices made. The logarithm of a point's value is taken to
be its forecast, plus a contribution of every choice, plus a smaller one of every pair of choices;
how large these are is itself chosen by the likelihood of what was measured (Duvenaud, Nickisch and
Rasmussen 2011, "Additive Gaussian Processes"). So two trials that share a choice tell of each
other, and ten trials can order a few hundred points. How far the forecast itself is right is learnt
in the same way, by a weight for it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError
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
        own = [KNOB**2 if d.needs else 1.0 for d in space.dimensions]
        self._weights: Array = np.array(own)

    def at(
        self,
        wanted: Sequence[Point],
        seen: Sequence[Point],
        values: Sequence[float],
        noises: Sequence[float] | None = None,
    ) -> Posterior:
        """What is believed of the wanted points after these measurements (see `after`)."""
        return self.after(seen, values, noises)(wanted)

    def after(
        self,
        seen: Sequence[Point],
        values: Sequence[float],
        noises: Sequence[float] | None = None,
    ) -> Callable[[Sequence[Point]], Posterior]:
        """What is believed after these measurements, to be asked of any points.

        Args:
            seen: measured points; one may stand there several times.
            values: theirs.
            noises: of each value; the usual noise if left out.
        """
        if not seen:
            return self._vague
        rows, before = self._levels(seen)
        rest = np.asarray(values, dtype=np.float64) - before
        alike_ss = self._alike(rows, rows)
        own = np.full(len(rest), self.noise) if noises is None else np.asarray(noises)
        ways = list(itertools.product(self._scales, PAIRS, self._aparts))
        trusted = TRUST**2 * np.outer(before, before)
        fits = [
            self._fit(_mixed(*alike_ss, *way[:2]) + trusted, rest, own**2 + way[2] ** 2)
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
                scale, share, apart = ways[i]
                _, lower, solved = fits[i]
                across = _mixed(*alike, scale, share) + TRUST**2 * np.outer(first, before)
                half = np.linalg.solve(lower, across.T)  # (seen, wanted)
                spread: Array = self._prior(scale, share) + TRUST**2 * first**2
                variance = np.maximum(spread - (half**2).sum(0), 0.0) + apart**2
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
        width = math.hypot(middle * math.sqrt(self._weights.sum()), self._aparts[-1])
        return Posterior(first, np.full(len(wanted), width))

    def _fit(self, covariance: Array, rest: Array, own: Array) -> tuple[float, Any, Any]:
        """Log likelihood of the measurements, and what a prediction needs of them."""
        lower = np.linalg.cholesky(covariance + np.diag(own))
        solved = np.linalg.solve(lower, rest)
        likelihood = -0.5 * float(solved @ solved) - float(np.log(np.diag(lower)).sum())
        return likelihood, lower, solved

    def _prior(self, scale: float, share: float) -> float:
        single = float(self._weights.sum())
        pairs = (single**2 - float((self._weights**2).sum())) / 2
        return scale**2 * (single + share**2 * pairs)

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
        for place, d in enumerate(self._space.dimensions):
            a, b = one[:, place][:, None], two[:, place][None, :]
            same = (a == b).astype(np.float64)
            if d.ordered:
                both = (a >= 0) & (b >= 0)
                same = np.where(both, NEAR ** np.abs(a - b), same)
            same *= self._weights[place]
            total += same
            squares += same**2
        return total, (total**2 - squares) / 2


def _mixed(single: Array, pairs: Array, scale: float, share: float) -> Array:
    return scale**2 * (single + share**2 * pairs)


def expected_improvement(found: Posterior, best: float) -> Array:
    """By how much a point is expected to beat ``best`` (Jones, Schonlau and Welch 1998)."""
    distance = (found.mean - best) / found.deviation
    density = np.exp(-0.5 * distance**2) / math.sqrt(2 * math.pi)
    return found.deviation * (distance * normal_cdf(distance) + density)


def normal_cdf(z: Array) -> Array:
    """The normal distribution function."""
    from scipy.special import ndtr

    found: Array = ndtr(z)
    return found


def importance(
    space: Space, means: Callable[[Sequence[Point]], Sequence[float]]
) -> dict[str, float]:
    """How much each decision moves the believed value: the spread of its values' means, a share."""
    points = space.points()
    believed = means(points)
    spreads: dict[str, float] = {}
    for place, d in enumerate(space.dimensions):
        groups: dict[int, list[float]] = {}
        for point, value in zip(points, believed, strict=True):
            if space.active(point)[place]:
                groups.setdefault(point[place], []).append(value)
        middle = [statistics.fmean(g) for g in groups.values()]
        spreads[d.name] = max(middle) - min(middle) if middle else 0.0
    total = math.fsum(spreads.values()) or 1.0
    found = {name: round(s / total, 4) for name, s in spreads.items()}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


# What is learnt from a point that failed: which of its choices may be to blame.
#
# A failure is no speed, so it says nothing of the forecast; but the next points should do without
# its cause. Suspect is each choice that the start hasn't, and each pair of them. Who worked in
# another point is cleared, and where the message names a technique, its own choice is among the
# culprits (group testing, Dorfman 1943, with one culprit a failure). A point's chance to fail is
# the share of suspicion that its choices carry.

PAIR = 0.5  # of two together, as a share of the product of theirs


def blamed_choice(why: str | None, settings: Mapping[str, Any]) -> str | None:
    """The choice that a message names at its beginning: ``plan: NAME: ...`` or ``NAME: ...``."""
    named = re.match(r"(?:plan: )?(\w+):", why or "")
    return named[1] if named and named[1] in settings.values() else None


class Failures:
    """Suspects of all failures in a space, and who was cleared."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._places = {d.name: i for i, d in enumerate(space.dimensions)}
        self._worked: list[Point] = [space.start]
        self._failed: list[tuple[Point, str | None]] = []
        self._suspicion: list[tuple[Point, list[int], Array]] = []

    def worked(self, point: Point) -> None:
        self._worked.append(point)
        self._weigh()

    def failed(self, point: Point, name: str | None) -> None:
        """``name``: of the choice that is to blame, alone or beside another; None: nobody knows."""
        self._failed.append((point, name))
        self._weigh()

    def chances(self, points: Sequence[Point]) -> Array:
        """Of each point to fail."""
        fine = np.ones(len(points))
        for point, changed, weights in self._suspicion:
            total = weights.sum()
            if total > 0:
                shared = self._shared(points, point, changed)
                fine *= 1 - np.einsum("ni,ij,nj->n", shared, weights, shared) / total
        return 1 - fine

    def _weigh(self) -> None:
        """Suspicion of each choice (the diagonal) and each pair, for every failure."""
        self._suspicion = []
        for point, name in self._failed:
            changed = [
                i
                for i, on in enumerate(self._space.active(point))
                if on and point[i] != self._space.start[i]
            ]
            own = np.array([KNOB if self._space.dimensions[i].needs else 1.0 for i in changed])
            weights = np.triu(PAIR * np.outer(own, own), 1) + np.diag(own)
            if name is not None:
                accused = np.array([self._value(point, i) == name for i in changed])
                weights *= accused[:, None] | accused[None, :]
            for shared in self._shared(self._worked, point, changed):
                weights *= 1 - np.outer(shared, shared)
            self._suspicion.append((point, changed, weights))

    def _value(self, point: Point, place: int) -> Any:
        return self._space.dimensions[place].values[point[place]]

    def _shared(self, points: Sequence[Point], point: Point, changed: Sequence[int]) -> Array:
        """Which of a point's changed choices other points have, too: (points, changed)."""
        indices = np.asarray(points)
        same: dict[int, Any] = {}
        for i, d in enumerate(self._space.dimensions):
            same[i] = indices[:, i] == point[i]
            if d.needs is not None:  # it matters under the same choice alone
                same[i] = same[i] & same[self._places[d.needs[0]]]
        columns = [same[i] for i in changed]
        return np.stack(columns, axis=1).astype(float) if columns else np.zeros((len(points), 0))


# What earlier studies of similar jobs tell before the first trial: a forecast that was measured.
#
# Two jobs are similar if their records say the same of what they are `about` (architecture, device
# and objective; of a loop, its name). Settings that both know are matched by name and value; what
# an earlier study measured is believed half, since the job is another.

BELIEVED = 0.5
FEWEST = 3  # trials, or nothing is learnt
VAGUE = 0.05  # added to the noise of another job's measurement


def similar_trials(folder: Path, about: Mapping[str, Any], but: str) -> list[dict[str, Any]]:
    """Trials of a folder's studies that are about the same; a damaged record is passed over."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/record.jsonl")):
        if path.parent.name == but:
            continue
        try:
            events = [json.loads(line) for line in path.read_text().splitlines()]
            if any(e.get("event") == "about" and e.get("what") == about for e in events):
                found += [
                    e for e in events if e.get("event") in ("trial", "tried") and e["state"] == "ok"
                ]
        except (OSError, ValueError, AttributeError, KeyError):
            continue
    return found


def corrected_forecast(
    space: Space, trials: Sequence[Mapping[str, Any]], forecast: Callable[[Point], float]
) -> Callable[[Point], float]:
    """The forecast as earlier trials correct it; itself where they are too few.

    Their values are over a start of their own: what is told is over this one's, which is 0.
    """
    seen, values = [], []
    for trial in trials:
        try:
            seen.append(space.point(trial["settings"]))
        except InputError:
            continue  # a setting that this job doesn't have
        values.append(float(trial["log_rate"]))
    if len(seen) < FEWEST:
        return forecast
    believed = PlanGaussianProcess(space, forecast, VAGUE).after(seen, values)
    known: dict[Point, float] = {}

    def corrected(point: Point) -> float:
        if point not in known:
            points = [point] if known else [*space.points(), point]  # most will be asked for
            known.update(zip(points, map(float, believed(points).mean), strict=True))
        before = forecast(point)
        return before + BELIEVED * (known[point] - before)

    first = corrected(space.start)
    return lambda point: corrected(point) - first
