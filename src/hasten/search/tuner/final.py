"""The final: the best few take turns among themselves, and who is behind leaves.

The best of many trials is in part luck, and a trial may have one round. Here all are in the same
rounds, so that what slows a round slows all of them: what counts is the difference within a round.
Whoever is behind the leader beyond doubt leaves, and the others have the more rounds for it
(racing: Maron and Moore 1994, "Hoeffding Races").
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hasten.errors import InputError
from hasten.evidence.statistics import hodges_lehmann
from hasten.evidence.students_t import student_quantile
from hasten.search.tuner.space import Point
from hasten.search.tuner.turns import OutOfTimeError, Runner, RunnerFailedError

if TYPE_CHECKING:
    from hasten.search.tuner.bench import Bench

MOST_ROUNDS = 60
FEWEST = 4  # rounds before anybody leaves
BEHIND = 0.002  # chance that an equal is as far behind; it is asked after every round
Logs = Mapping[Point, Sequence[float]]  # of each round: the rate over the start's, a logarithm


def side_by_side(
    bench: Bench, points: Sequence[Point], deadline: float, rounds: int = MOST_ROUNDS
) -> dict[Point, tuple[float, ...]]:
    """The points' processes, all alive at once, take turns until one is left or time is up.

    Returns:
        By point, a logarithm of its rate over the start's for each whole round that it was in; none
        of a point that failed to start, and of nobody where the time wasn't enough.
    """
    runners: dict[Point, Runner] = {}
    found: dict[Point, list[float]] = {}
    try:
        bench.ready(deadline)
        runners = {point: bench.start(point) for point in points if point != bench.beside}
        counts: dict[Point, int] = {}
        for point, runner in tuple(runners.items()):  # all are being built meanwhile
            try:
                counts[point] = bench.turns.length(bench.turns.warmed(runner, deadline))
            except RunnerFailedError:
                runners.pop(point).end(at_once=True)
        found = {point: [] for point in points if point in runners or point == bench.beside}
        racing = list(found)
        for _ in range(rounds):
            logs = _round(bench, runners, counts, deadline)
            for point in racing:
                found[point].append(logs[point])
            for point in behind({p: found[p] for p in racing}):
                racing.remove(point)
                if point in runners:
                    runners.pop(point).end(at_once=True)
            if len(racing) < 2:
                break
    except (OutOfTimeError, RunnerFailedError, InputError):
        pass  # the rounds before it count
    finally:
        for runner in runners.values():
            runner.end(at_once=True)
    return {point: tuple(logs) for point, logs in found.items() if logs}


def behind(logs: Logs) -> list[Point]:
    """Of points that were in the same rounds those that are slower than the first beyond doubt."""
    first, *others = leading(logs)
    count = len(logs[first])
    if count < FEWEST:
        return []
    found, far = [], student_quantile(1 - BEHIND, count - 1)
    for point in others:
        gaps = [a - b for a, b in zip(logs[first], logs[point], strict=True)]
        error = statistics.stdev(gaps) / math.sqrt(count)
        if statistics.fmean(gaps) > far * error:
            found.append(point)
    return found


def leading(logs: Logs) -> list[Point]:
    """The points, best first: who was in more rounds, then by the rounds that all of these share.

    A round's own speed is taken out: it is that of the machine at that time.
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
    bench: Bench, runners: Mapping[Point, Runner], counts: Mapping[Point, int], deadline: float
) -> dict[Point, float]:
    """Logarithms over the start's rate, by that of the process that stays."""
    found = bench.round(list(runners.values()), [counts[p] for p in runners], deadline)
    logs = {p: bench.above + own.log for p, own in zip(runners, found, strict=True)}
    return {**logs, bench.beside: bench.above}
