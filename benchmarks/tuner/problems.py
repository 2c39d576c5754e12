"""What tuners are tried on: a recorded grid, and spaces whose truth is a formula.

Values are logarithms over the start's. See ../bench_tuner.py for what is counted.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.tune.samplers import PriorKnowledge, TriedPoint
from hasten.tune.space import Dimension, Point, Space

OF_MEDIAN = 0.67  # of the noise is left in the median of three rounds
ERROR = 0.08  # of the synthetic forecasts, as a logarithm
GRID = Path(__file__).parent / "grid.json"


@dataclass(frozen=True)
class Problem:
    """A space with a truth; values are logarithms over the start's."""

    space: Space
    truth: Callable[[Point], float]
    trial: Callable[[Point, random.Random], TriedPoint]
    first: TriedPoint  # the start, measured before all
    known: Callable[[int], PriorKnowledge]  # by seed
    best: float


def of_values(knobs: Mapping[str, list[Any]], start: Mapping[str, Any] | None = None) -> Space:
    """A space of plain lists; numbers in rising order count as ordered."""
    dimensions = []
    for name, values in knobs.items():
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        ordered = numbers and len(values) > 2 and values == sorted(values)
        dimensions.append(Dimension(name, tuple(values), ordered))
    space = Space(tuple(dimensions), (0,) * len(dimensions))
    return Space(space.dimensions, space.point(start or {}))


def recorded() -> Problem:
    found = json.loads(GRID.read_text())
    dimensions = tuple(
        Dimension(d["name"], tuple(d["values"]), d["ordered"], d["needs"] and tuple(d["needs"]))
        for d in found["dimensions"]
    )
    rows = {tuple(row["point"]): row for row in found["points"]}
    start = (0,) * len(dimensions)

    def refuse(point: Point) -> str | None:
        return None if point == start or point in rows else "was not recorded"

    truths = {p: math.log(statistics.median(r["ratios"])) for p, r in rows.items()}
    truths.setdefault(start, 0.0)

    def trial(point: Point, draw: random.Random) -> TriedPoint:
        value = math.log(statistics.median(draw.sample(rows[point]["ratios"], 3)))
        return TriedPoint(point, "ok", value)

    noise = OF_MEDIAN * found["relative_spread_of_a_round"]  # a study measures it first
    known = PriorKnowledge(gain=lambda p: rows[p]["expected"] if p in rows else 0.0, noise=noise)
    space = Space(dimensions, start, refuse)
    first = TriedPoint(start, "ok", 0.0)
    return Problem(
        space, truths.__getitem__, trial, first, lambda seed: known, max(truths.values())
    )


SYNTHETIC: dict[str, list[Any]] = {
    "micro_batch": [1, 2, 4, 8, 16, 32],
    "recompute": ["none", "half", "all"],
    "precision": ["fp32", "bf16", "fp8"],
    "moments": ["fp32", "bf16", "int8"],
    "shards": [1, 2, 4, 8],
    "fused": [False, True],
    "compiled": [False, True],
    "read_ahead": [False, True],
}


def seconds_and_bytes(s: dict[str, Any]) -> tuple[float, float]:
    """A step of 64 records of a model with 1 G parameters, in units of nothing in particular."""
    again = {"none": 0.0, "half": 1 / 6, "all": 1 / 3}[s["recompute"]]
    rate = {"fp32": 1.0, "bf16": 2.1, "fp8": 2.7}[s["precision"]]
    width = {"fp32": 4, "bf16": 2, "fp8": 1.6}[s["precision"]]
    full = s["micro_batch"] / (s["micro_batch"] + 1.5)  # small passes don't fill the device
    compute = 10 * (1 + again) / rate / full
    moved = 3.0 * width / 4 * (0.55 if s["fused"] else 1.0) * (0.8 if s["compiled"] else 1.0)
    moved *= 0.9 if s["fused"] and s["compiled"] else 1.0
    launches = 64 / s["micro_batch"] * 0.05 * (0.4 if s["compiled"] else 1.0)
    communication = 0.0 if s["shards"] == 1 else 0.5 * math.log2(s["shards"])
    update = {"fp32": 0.6, "bf16": 0.45, "int8": 0.55}[s["moments"]] / s["shards"]
    wait = 0.0 if s["read_ahead"] else 0.35
    state = {"fp32": 8, "bf16": 4, "int8": 2.1}[s["moments"]]
    kept = {"none": 1.0, "half": 0.55, "all": 0.15}[s["recompute"]]
    activations = 1.1 * s["micro_batch"] * width * kept * (0.8 if s["fused"] else 1.0)
    memory = (4 + 4 + state) / s["shards"] + activations + 1.0 + 0.2 * s["compiled"]
    return compute + moved + launches + communication + update + wait, memory


def errors(
    space: Space, points: list[Point], seed: float, scattered: bool
) -> Callable[[Point], float]:
    """A forecast's error: of each choice, adding up to ERROR, or of each point by itself."""
    draw = random.Random(f"errors {seed}")
    if scattered:
        each = {p: draw.gauss(0, ERROR) for p in points}
        return each.__getitem__
    share = ERROR / math.sqrt(len(space.dimensions))
    own = [[draw.gauss(0, share) for _ in d.values] for d in space.dimensions]
    return lambda point: sum(row[i] for row, i in zip(own, point, strict=True))


def synthetic(scattered: bool = False) -> Problem:
    space = of_values(SYNTHETIC, {"shards": 8, "recompute": "all"})  # a cautious start
    every = {p: seconds_and_bytes(space.settings(p)) for p in space.points()}
    limit = statistics.median(memory for _, memory in every.values())
    first = every[space.start][0]
    assert every[space.start][1] <= limit
    truths = {p: math.log(first / s) for p, (s, m) in every.items()}

    def trial(point: Point, draw: random.Random) -> TriedPoint:
        memory = every[point][1]
        if memory > limit:
            return TriedPoint(point, "out of memory")
        return TriedPoint(point, "ok", truths[point] + draw.gauss(0, 0.03), memory)

    def known(seed: int) -> PriorKnowledge:
        time_wrong, memory_wrong = (
            errors(space, list(every), seed + n, scattered) for n in (0, 0.5)
        )
        return PriorKnowledge(
            gain=lambda p: truths[p] + time_wrong(p),
            memory=lambda p: every[p][1] * math.exp(memory_wrong(p)),
            limit=limit,
            noise=0.03,
        )

    fitting = max(truths[p] for p, (_, m) in every.items() if m <= limit)
    start = TriedPoint(space.start, "ok", 0.0, every[space.start][1])
    return Problem(space, truths.__getitem__, trial, start, known, fitting)


# Knobs of little weight, as most of a catalogue's are: 2 % each at most, by one of four values.
SMALL_KNOBS = {f"knob {n}": [1, 2, 4, 8] for n in range(6)}


def wide() -> Problem:
    """The synthetic space with six small knobs: 21 million points, of which a study sees some."""
    core = of_values(SYNTHETIC, {"shards": 8, "recompute": "all"})
    space = of_values({**SYNTHETIC, **SMALL_KNOBS}, {"shards": 8, "recompute": "all"})
    count = len(core.dimensions)
    every = {p: seconds_and_bytes(core.settings(p)) for p in core.points()}
    limit = statistics.median(memory for _, memory in every.values())
    first = every[core.start][0]
    tops = random.Random("tops").choices(range(4), k=len(SMALL_KNOBS))

    def truth(point: Point) -> float:
        near = sum(1 - abs(a - b) / 3 for a, b in zip(point[count:], tops, strict=True))
        return math.log(first / every[point[:count]][0]) + 0.02 * near

    def trial(point: Point, draw: random.Random) -> TriedPoint:
        memory = every[point[:count]][1]
        if memory > limit:
            return TriedPoint(point, "out of memory")
        value = truth(point) - truth(space.start) + draw.gauss(0, 0.03)
        return TriedPoint(point, "ok", value, memory)

    def known(seed: int) -> PriorKnowledge:
        time_wrong, memory_wrong = (errors(space, [], seed + n, False) for n in (0, 0.5))
        return PriorKnowledge(
            gain=lambda p: truth(p) - truth(space.start) + time_wrong(p) - time_wrong(space.start),
            memory=lambda p: every[p[:count]][1] * math.exp(memory_wrong(p)),
            limit=limit,
            noise=0.03,
        )

    fitting = max(math.log(first / s) for s, m in every.values() if m <= limit)
    start = TriedPoint(space.start, "ok", 0.0, every[core.start][1])
    return Problem(space, truth, trial, start, known, fitting + 0.02 * len(SMALL_KNOBS))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "grid": recorded,
    "synthetic": synthetic,
    "scattered": lambda: synthetic(scattered=True),
    "wide": wide,
}
# Ways that a problem tells apart; all, where it isn't named: forecasts are hasten's own.
WAYS_OF = {
    "scattered": ("forecast", "forecast, then GP", "hasten"),
    "wide": ("random", "TPE", "hasten"),
}
