"""How many trials a tuner needs: on a recorded grid, and on a space half of which is too large.

    python benchmarks/bench_tuner.py [--seeds 40] [--problem grid|synthetic|scattered]

The grid is real (tuner/grid.json, recorded by tuner/record_grid.py): a trial's result is the
median of three of a point's rounds, drawn at random. The synthetic space has 5,184 points; its time
follows a roofline with interactions, its memory a sum of weights, state and activations; half of it
exceeds the limit, which shows only when a point is tried. Trials there have 3 % noise. hasten's own
order is given a forecast: on the grid what its techniques forecast of themselves, on the synthetic
space the truth with an error of 8 %, of time and of memory, drawn anew for each seed: of each
choice (as errors of a model's terms are), or, harder, of each point by itself ("scattered errors").
"without a forecast" gets none.

Counted are the trials until one of the three best by measured value, which is what a duel would
decide among, is within 3 % of the best point there is. Median over seeds ("-": not within 40).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.search.tuner.optuna_proposers import OptunaProposer
from hasten.search.tuner.proposers import Bandit, Beforehand, Own, Proposer, Shuffled, Tried
from hasten.search.tuner.space import Dimension, Point, Space, of_values
from hasten.search.tuner.study import OF_MEDIAN

TRIALS, WITHIN, DUEL = 40, 0.03, 3
ERROR = 0.08  # of the synthetic forecasts, as a logarithm
GRID = Path(__file__).parent / "tuner" / "grid.json"


@dataclass(frozen=True)
class Problem:
    """A space with a truth; values are logarithms over the start's."""

    space: Space
    truth: Callable[[Point], float]
    trial: Callable[[Point, random.Random], Tried]
    first: Tried  # the start, measured before all
    known: Callable[[int], Beforehand]  # by seed
    best: float


class OneAtATime:
    """Values of one dimension after the other, from the best point so far: what people do."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._best, self._value = space, space.start, 0.0
        self._order = random.Random(seed).sample(
            range(len(space.dimensions)), len(space.dimensions)
        )
        self._done = {space.start}
        self._queue: list[tuple[int, int]] = []

    def ask(self) -> Point | None:
        for _ in range(3):  # sweeps over all dimensions
            for place in self._order:
                for value in range(len(self._space.dimensions[place].values)):
                    new = (*self._best[:place], value, *self._best[place + 1 :])
                    point = self._space.canonical(new)
                    if point not in self._done and self._space.refuse(point) is None:
                        return point
        return None

    def tell(self, tried: Tried) -> None:
        self._done.add(tried.point)
        if tried.value is not None and tried.value > self._value:
            self._best, self._value = tried.point, tried.value


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

    def trial(point: Point, draw: random.Random) -> Tried:
        value = math.log(statistics.median(draw.sample(rows[point]["ratios"], 3)))
        return Tried(point, "ok", value)

    noise = OF_MEDIAN * found["relative_spread_of_a_round"]  # a study measures it first
    known = Beforehand(gain=lambda p: rows[p]["expected"] if p in rows else 0.0, noise=noise)
    space = Space(dimensions, start, refuse)
    first = Tried(start, "ok", 0.0)
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
    wire = 0.0 if s["shards"] == 1 else 0.5 * math.log2(s["shards"])
    update = {"fp32": 0.6, "bf16": 0.45, "int8": 0.55}[s["moments"]] / s["shards"]
    wait = 0.0 if s["read_ahead"] else 0.35
    state = {"fp32": 8, "bf16": 4, "int8": 2.1}[s["moments"]]
    kept = {"none": 1.0, "half": 0.55, "all": 0.15}[s["recompute"]]
    activations = 1.1 * s["micro_batch"] * width * kept * (0.8 if s["fused"] else 1.0)
    memory = (4 + 4 + state) / s["shards"] + activations + 1.0 + 0.2 * s["compiled"]
    return compute + moved + launches + wire + update + wait, memory


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

    def trial(point: Point, draw: random.Random) -> Tried:
        memory = every[point][1]
        if memory > limit:
            return Tried(point, "out of memory")
        return Tried(point, "ok", truths[point] + draw.gauss(0, 0.03), memory)

    def known(seed: int) -> Beforehand:
        time_wrong, memory_wrong = (
            errors(space, list(every), seed + n, scattered) for n in (0, 0.5)
        )
        return Beforehand(
            gain=lambda p: truths[p] + time_wrong(p),
            memory=lambda p: every[p][1] * math.exp(memory_wrong(p)),
            limit=limit,
            noise=0.03,
        )

    fitting = max(truths[p] for p, (_, m) in every.items() if m <= limit)
    start = Tried(space.start, "ok", 0.0, every[space.start][1])
    return Problem(space, truths.__getitem__, trial, start, known, fitting)


def unknown(problem: Problem, seed: int) -> Beforehand:
    known = problem.known(seed)
    return Beforehand(limit=known.limit, noise=known.noise)


WAYS: dict[str, Callable[[Problem, int], Proposer]] = {
    "random": lambda p, seed: Shuffled(p.space, seed),
    "one at a time": lambda p, seed: OneAtATime(p.space, seed),
    "genetic (NSGA-II)": lambda p, seed: OptunaProposer("genetic", p.space, seed),
    "bandit": lambda p, seed: Bandit(p.space, seed),
    "CMA-ES": lambda p, seed: OptunaProposer("cmaes", p.space, seed),
    "TPE": lambda p, seed: OptunaProposer("tpe", p.space, seed),
    "GP": lambda p, seed: OptunaProposer("gp", p.space, seed),
    "hasten, without a forecast": lambda p, seed: Own(p.space, unknown(p, seed), seed),
    "hasten": lambda p, seed: Own(p.space, p.known(seed), seed),
}


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "grid": recorded,
    "synthetic": synthetic,
    "scattered": lambda: synthetic(scattered=True),  # only of hasten's own: the others ask for none
}


def study(problem: Problem, way: Callable[[Problem, int], Proposer], seed: int) -> tuple[Any, int]:
    """Trials until within 3 % of the best (None: over 40), and those out of memory by then."""
    proposer, draw = way(problem, seed), random.Random(seed)
    proposer.tell(problem.first)
    tried: list[Tried] = []
    for number in range(1, TRIALS + 1):
        point = proposer.ask()
        if point is None:
            break
        result = problem.trial(point, draw)
        tried.append(result)
        proposer.tell(result)
        values = sorted((t for t in tried if t.value is not None), key=lambda t: -(t.value or 0.0))
        if any(
            problem.truth(t.point) >= problem.best + math.log(1 - WITHIN) for t in values[:DUEL]
        ):
            return number, failures(tried)
    return None, failures(tried)


def failures(tried: list[Tried]) -> int:
    return sum(t.state == "out of memory" for t in tried)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--problem", choices=tuple(PROBLEMS))
    parser.add_argument("--only", default="", help="ways whose name ends like this")
    asked = parser.parse_args()
    for name, make in PROBLEMS.items():
        if asked.problem not in (None, name):
            continue
        problem = make()
        points = len(problem.space.points())
        print(f"\n{name}: {points} points, best {math.exp(problem.best):.3f} of the start")
        print(f"{'':28}{'median':>7}{'<= 12':>8}{'<= 40':>8}{'OOM mean':>10}{'most':>6}{'s':>7}")
        for title, way in WAYS.items():
            if not title.endswith(asked.only) or (name == "scattered" and title != "hasten"):
                continue
            began = time.monotonic()
            found = [study(problem, way, seed) for seed in range(asked.seeds)]
            taken = (time.monotonic() - began) / asked.seeds
            counts = sorted(math.inf if n is None else n for n, _ in found)
            middle = statistics.median(counts)
            row = [f"{middle:.0f}" if math.isfinite(middle) else "-"]
            row += [f"{sum(c <= n for c in counts) / len(counts):.0%}" for n in (12, 40)]
            oom = [f for _, f in found]
            row += [f"{statistics.fmean(oom):.1f}", f"{max(oom)}", f"{taken:.2f}"]
            widths = (7, 8, 8, 10, 6, 7)
            print(
                f"{title:28}" + "".join(f"{t:>{w}}" for t, w in zip(row, widths, strict=True)),
                flush=True,
            )


if __name__ == "__main__":
    main()
