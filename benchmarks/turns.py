"""Ways that take turns: each once a round, so that what changes on the machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each way returned in each round; a first round, which warms up, is left out."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, act in ways.items():
            value = act()
            if number:
                found[name].append(value)
    return found


def timed(act: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = now()
    act()
    return now() - began


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of a way's value to another's in the same round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))
