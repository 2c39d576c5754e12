"""How many trials a tuner needs: on a recorded grid, and on a space half of which is too large.

    python benchmarks/bench_tuner.py [--seeds 40] [--problem grid|synthetic|scattered|wide]
    python benchmarks/bench_tuner.py real --budget 8m --repeats 5 --json OUT    (tuner/real.py)

The grid is real (tuner/grid.json, recorded by tuner/record_grid.py): a trial's result is the
median of three of a point's rounds, drawn at random. The synthetic space has 5,184 points; its time
follows a roofline with interactions, its memory a sum of weights, state and activations; half of it
exceeds the limit, which shows only when a point is tried. Trials there have 3 % noise. hasten's own
order is given a forecast: on the grid what its techniques forecast of themselves, on the synthetic
space the truth with an error of 8 %, of time and of memory, drawn anew for each seed: of each
choice (as errors of a model's terms are), or, harder, of each point by itself ("scattered errors").
"without a forecast" gets none. "forecast" tries its order alone, "forecast, then GP" one point of
it and then what Optuna's Gaussian process proposes. The wide space has six further knobs that
matter little, and so many points that hasten's own looks at a sample and climbs from there.

Counted are the trials until one of the three best by measured value, which is what a final
comparison would decide among, is within 3 % of the best point there is. Median over seeds ("-": not
within 40).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from smoke import arguments
from tuner.problems import PROBLEMS, WAYS_OF, Problem

from hasten.tune.samplers import (
    Bandit,
    ForecastProposer,
    OptunaProposer,
    PriorKnowledge,
    Proposer,
    TriedPoint,
    proposer_of,
)
from hasten.tune.space import SMALL, Point, Space

TRIALS, WITHIN, DUEL = 40, 0.03, 3


class OneAtATime(Proposer):
    """Values of one dimension after the other, from the best point so far: what people do."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._best, self._most = space.start, 0.0
        self._order = random.Random(seed).sample(
            range(len(space.dimensions)), len(space.dimensions)
        )

    def _next(self) -> Point | None:
        for _ in range(3):  # sweeps over all dimensions
            for place in self._order:
                for value in range(len(self.space.dimensions[place].values)):
                    new = (*self._best[:place], value, *self._best[place + 1 :])
                    point = self.space.canonical(new)
                    if point not in self.proposed and self.space.refuse(point) is None:
                        return point
        return None

    def tell(self, tried: TriedPoint) -> None:
        super().tell(tried)
        if tried.score is not None and tried.score > self._most:
            self._best, self._most = tried.point, tried.score


class Forecast(Proposer):
    """The forecast's order within the predicted memory, whatever is measured."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem.space, seed)
        prior = problem.known(seed)
        limit, memory = prior.limit, prior.memory
        if limit is not None and memory is not None:
            self._points = [p for p in self._points if memory(p) <= 0.9 * limit]
        self._points.sort(key=lambda p: -prior.gain(p))


def unknown(problem: Problem, seed: int) -> PriorKnowledge:
    known = problem.known(seed)
    return PriorKnowledge(limit=known.limit, noise=known.noise)


WAYS: dict[str, Callable[[Problem, int], Proposer]] = {
    "random": lambda p, seed: Proposer(p.space, seed),
    "one at a time": lambda p, seed: OneAtATime(p.space, seed),
    "genetic (NSGA-II)": lambda p, seed: OptunaProposer("genetic", p.space, seed),
    "bandit": lambda p, seed: Bandit(p.space, seed),
    "CMA-ES": lambda p, seed: OptunaProposer("cmaes", p.space, seed),
    "TPE": lambda p, seed: OptunaProposer("tpe", p.space, seed),
    "GP": lambda p, seed: OptunaProposer("gp", p.space, seed),
    "forecast, then GP": lambda p, seed: proposer_of("gp", p.space, p.known(seed), seed),
    "forecast": Forecast,
    "hasten, without a forecast": lambda p, seed: ForecastProposer(p.space, unknown(p, seed), seed),
    "hasten": lambda p, seed: ForecastProposer(p.space, p.known(seed), seed),
}


def study(problem: Problem, way: Callable[[Problem, int], Proposer], seed: int) -> tuple[Any, int]:
    """Trials until within 3 % of the best (None: over 40), and those out of memory by then."""
    proposer, draw = way(problem, seed), random.Random(seed)
    proposer.tell(problem.first)
    tried: list[TriedPoint] = []
    for number in range(1, TRIALS + 1):
        point = proposer.ask()
        if point is None:
            break
        result = problem.trial(point, draw)
        tried.append(result)
        proposer.tell(result)
        values = sorted((t for t in tried if t.score is not None), key=lambda t: -(t.score or 0.0))
        if any(
            problem.truth(t.point) >= problem.best + math.log(1 - WITHIN) for t in values[:DUEL]
        ):
            return number, failures(tried)
    return None, failures(tried)


def failures(tried: list[TriedPoint]) -> int:
    return sum(t.state == "out of memory" for t in tried)


def main() -> None:
    if sys.argv[1:2] == ["real"]:
        from tuner.real import main as real

        real(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--problem", choices=tuple(PROBLEMS))
    parser.add_argument("--only", default="", help="ways whose name ends like this")
    asked = arguments(parser, seeds=1, problem="grid", TRIALS=3)
    for name, make in PROBLEMS.items():
        if asked.problem not in (None, name):
            continue
        problem = make()
        looked_at = len(problem.space.points())
        points = problem.space.size if problem.space.size > SMALL else looked_at
        print(f"\n{name}: {points} points, best {math.exp(problem.best):.3f} of the start")
        print(f"{'':28}{'median':>7}{'<= 12':>8}{'<= 40':>8}{'OOM mean':>10}{'most':>6}{'s':>7}")
        for title, way in WAYS.items():
            if not title.endswith(asked.only) or title not in WAYS_OF.get(name, WAYS):
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
