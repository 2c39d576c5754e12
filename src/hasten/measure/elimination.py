"""Finds the fastest of several workers: they take turns, and slower ones leave.

The best of many short measurements is in part process variance. Here all workers do the
same steps in each pass. An event that slows or lengthens a pass affects all of them,
and only the difference within a pass counts. Workers significantly behind the leader
leave, and the others have more rounds (racing: Maron and Moore 1994, "Hoeffding
Races").
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hasten.machine.processes import LoadMeter
from hasten.measure.schedule import VariantProcess, run_round
from hasten.measure.statistics import hodges_lehmann, student_quantile
from hasten.measure.workers import WorkerError

MOST_ROUNDS = 60
FEWEST = 6  # passes before anybody leaves
BEHIND = 0.002  # chance that an equal is as far behind; it is asked after every round
Name = TypeVar("Name")
Logs = Mapping[Name, Sequence[float]]  # of each pass: the logarithm of a rate


def eliminate(
    variants: dict[Name, VariantProcess],
    values: Mapping[Name, float],
    passes: Sequence[int],
    draw: random.Random,
    cores: int,
    rounds: int = MOST_ROUNDS,
) -> dict[Name, tuple[float, ...]]:
    """Runs the variants in turns until one remains, or time is up.

    Args:
        variants: warmed-up variants; those that leave are closed and removed.
        values: prior value of each: the logarithm of its rate relative to a reference.
        passes: the steps of each pass of a round.
        draw: random generator for the order.
        cores: cores of the machine.
        rounds: maximum number of rounds.

    Returns:
        By variant, such a logarithm for each of its passes, on the level of ``values``. If
        a variant fails or the deadline passes, that round is the last one and doesn't
        count.
    """
    log_rates: dict[Name, list[float]] = {name: [] for name in variants}
    load = LoadMeter(cores)
    for _ in range(rounds):
        if len(variants) < 2 and all(len(log_rates[name]) >= FEWEST for name in variants):
            break
        level = statistics.fmean(values[name] for name in variants)
        rates: dict[Name, list[float]] = {name: [] for name in variants}
        for name, turn in run_round(variants, passes, draw, load):
            if isinstance(turn, WorkerError):
                return {name: tuple(logs) for name, logs in log_rates.items()}
            rates[name].append(math.log(turn.rate))
        for logs in zip(*rates.values(), strict=True):
            middle = statistics.fmean(logs)
            for name, log in zip(rates, logs, strict=True):
                log_rates[name].append(level + log - middle)
        for name in surely_slower({name: log_rates[name] for name in variants}):
            variants.pop(name).worker.close(kill=True)
    return {name: tuple(logs) for name, logs in log_rates.items()}


def surely_slower(logs: Logs[Name]) -> list[Name]:
    """The variants that are significantly slower than the first, by their common passes."""
    first, *others = leading(logs)
    count = len(logs[first])
    if count < FEWEST:
        return []
    far = student_quantile(1 - BEHIND, count - 1)
    return [name for name in others if _slower(logs[first], logs[name], far)]


def ordered(logs: Logs[Name], expected: Callable[[Name], float]) -> list[Name]:
    """Sorts like `leading`, but the first's equals are led by the one expected to be best.

    The first among equals is the luckiest one. A variant is equal if it isn't slower by
    more than one standard error. This is the rule of Breiman et al. 1984, "Classification
    and Regression Trees", for the size of trees.
    """
    ranking = leading(logs)
    rounds = len(logs[ranking[0]]) if ranking else 0
    if rounds < FEWEST:
        return ranking
    comparable = [name for name in ranking if len(logs[name]) == rounds]
    equals = [name for name in comparable if not _slower(logs[ranking[0]], logs[name], 1.0)]
    best = max(equals, key=expected)  # the first of several
    return [best, *(name for name in ranking if name != best)]


def leading(logs: Logs[Name]) -> list[Name]:
    """The variants, best first: by the number of passes, then by their common passes.

    The mean speed of each pass is subtracted, because it depends on the machine at that
    time.
    """
    places: dict[Name, tuple[int, float]] = {}
    for name, series in logs.items():
        count = len(series)
        peers = [other for other in logs.values() if len(other) >= count]
        middle = [statistics.fmean(other[i] for other in peers) for i in range(count)]
        gaps = [a - b for a, b in zip(series, middle, strict=True)]
        places[name] = count, hodges_lehmann(gaps) if gaps else 0.0
    return sorted(logs, key=lambda name: places[name], reverse=True)


def _slower(first: Sequence[float], other: Sequence[float], far: float) -> bool:
    gaps = [a - b for a, b in zip(first, other, strict=True)]
    return statistics.fmean(gaps) > far * statistics.stdev(gaps) / math.sqrt(len(gaps))
