"""What the clock at the seams costs: a mark, and a small step with and without it in turn.

    python benchmarks/bench_ledger.py [--rounds 20] [--steps 20]

The step is of a toy model, so that the clock's share is larger than in any real run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/common"))

from smoke import arguments

from hasten.core.step import StepMetrics, training
from hasten.core.timing import FORWARD, HostClock, NoPhaseTimer
from tiny import language_job, session_of

MARKS = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    given = arguments(parser, rounds=3, steps=2, MARKS=1000)
    for clock in (NoPhaseTimer(), HostClock()):
        print(f"{type(clock).__name__:<10} {_mark_seconds(clock) * 1e9:6.0f} ns a mark")
    ratios, plain = [], []
    allowed = (given.rounds + 1) * given.steps
    runs: dict[str, Iterator[StepMetrics]] = {}
    for clock in (NoPhaseTimer(), HostClock()):
        session = session_of(language_job(steps=allowed))
        session.setup.clock = clock
        steps = runs[type(clock).__name__] = training(session)
        list(islice(steps, given.steps))
    for number in range(given.rounds):
        order = list(runs) if number % 2 else list(runs)[::-1]
        spent = {}
        for kind in order:
            found = list(islice(runs[kind], given.steps))
            spent[kind] = statistics.median(m.step_seconds for m in found)
        without, with_clock = (spent[name] for name in runs)
        ratios.append(with_clock / without)
        plain.append(without)
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"step without {statistics.median(plain) * 1e3:.2f} ms, median of {given.rounds} rounds")
    print(f"with / without {statistics.median(ratios):.4f}, middle half {low:.4f} to {high:.4f}")


def _mark_seconds(clock: NoPhaseTimer | HostClock) -> float:
    clock.begin()
    began = time.perf_counter()
    for _ in range(MARKS):
        clock.mark(FORWARD)
    return (time.perf_counter() - began) / MARKS


if __name__ == "__main__":
    main()
