"""The final: the best few take turns among themselves, and who is behind leaves.

The best of many trials is in part luck, and a trial may have one round. Here all take a turn in
each pass, with the same records: what slows a pass, or makes it long, does so for all of them, and
what counts is the difference within a pass. Whoever is behind the leader beyond doubt leaves, and
the others have the more rounds for it (racing: Maron and Moore 1994, "Hoeffding Races").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hasten.measure.statistics import hodges_lehmann, student_quantile
from hasten.measure.turns import OutOfTimeError, Runner, rate
from hasten.measure.workers import WorkerError
from hasten.tune.space import Point

if TYPE_CHECKING:
    from hasten.tune.bench import ReferencePair

MOST_ROUNDS = 60
FEWEST = 6  # passes before anybody leaves
BEHIND = 0.002  # chance that an equal is as far behind; it is asked after every round
Logs = Mapping[Point, Sequence[float]]  # of each pass: the rate over the start's, a logarithm


def side_by_side(
    bench: ReferencePair, values: Mapping[Point, float], deadline: float, rounds: int = MOST_ROUNDS
) -> dict[Point, tuple[float, ...]]:
    """The points' processes, all alive at once, take turns until one is left or time is up.

    Args:
        bench: where they are started; its own process ends.
        values: what trials say of each, the logarithm of its rate over the start's.
        deadline: by the bench's clock.
        rounds: at most.

    Returns:
        By point, such a logarithm for each pass that it was in, on the level of those values; none
        of a point that failed to start, and of nobody where the time wasn't enough.
    """
    runners: dict[Point, Runner] = {}
    found: dict[Point, list[float]] = {}
    try:
        bench.close()
        runners = {point: bench.start(point) for point in values}
        counts = []
        for point, runner in tuple(runners.items()):  # all are being built meanwhile
            try:
                counts.append(bench.turns.length(bench.turns.warmed(runner, deadline)))
            except WorkerError:
                runners.pop(point).end(at_once=True)
        found = {point: [] for point in runners}
        for runner in runners.values():
            runner.again()  # all at the same records from here on
        for _ in range(rounds):
            if len(runners) < 2 and all(len(found[p]) >= FEWEST for p in runners):
                break
            level = statistics.fmean(values[point] for point in runners)
            for logs in _round(bench, runners, min(counts), deadline):
                middle = statistics.fmean(logs.values())
                for point, log in logs.items():
                    found[point].append(level + log - middle)
            for point in behind({p: found[p] for p in runners}):
                runners.pop(point).end(at_once=True)
    except (OutOfTimeError, WorkerError):
        pass  # the rounds before it count
    finally:
        for runner in runners.values():
            runner.end(at_once=True)
    return {point: tuple(logs) for point, logs in found.items() if logs}


def behind(logs: Logs) -> list[Point]:
    """Of points that were in the same passes those that are slower than the first beyond doubt."""
    first, *others = leading(logs)
    count = len(logs[first])
    if count < FEWEST:
        return []
    far = student_quantile(1 - BEHIND, count - 1)
    return [point for point in others if _slower(logs[first], logs[point], far)]


def ordered(logs: Logs, expected: Callable[[Point], float]) -> list[Point]:
    """As `leading`, but of the first's equals that one leads of which most was expected beforehand.

    The first among equals is the luckiest. Equal is who isn't slower by more than a standard error
    (the rule of Breiman et al. 1984, "Classification and Regression Trees", for the size of trees).
    """
    found = leading(logs)
    rounds = len(logs[found[0]]) if found else 0
    if rounds < FEWEST:
        return found
    beside = [p for p in found if len(logs[p]) == rounds]
    equals = [p for p in beside if not _slower(logs[found[0]], logs[p], 1.0)]
    best = max(equals, key=expected)  # the first of several
    return [best, *(p for p in found if p != best)]


def _slower(first: Sequence[float], other: Sequence[float], far: float) -> bool:
    """Whether the other is behind by more than so many standard errors."""
    gaps = [a - b for a, b in zip(first, other, strict=True)]
    return statistics.fmean(gaps) > far * statistics.stdev(gaps) / math.sqrt(len(gaps))


def leading(logs: Logs) -> list[Point]:
    """The points, best first: who was in more passes, then by the passes that all of these share.

    A pass's own speed is taken out: it is that of the machine at that time.
    """
    places: dict[Point, tuple[int, float]] = {}
    for point, own in logs.items():
        count = len(own)
        beside = [other for other in logs.values() if len(other) >= count]
        middle = [statistics.fmean(other[i] for other in beside) for i in range(count)]
        gaps = [a - b for a, b in zip(own, middle, strict=True)]
        places[point] = count, hodges_lehmann(gaps) if gaps else 0.0
    return sorted(logs, key=lambda point: places[point], reverse=True)


def _round(
    bench: ReferencePair, runners: Mapping[Point, Runner], count: int, deadline: float
) -> list[dict[Point, float]]:
    """By pass the logarithm of each point's rate."""
    found = bench.turns.round(tuple(runners.values()), count, deadline, bench.draw)
    return [
        {p: math.log(rate(steps)) for p, steps in zip(runners, row, strict=True)} for row in found
    ]
