"""What a bench and its runners tell each other: steps, measurements, and what went wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hasten.search.tuner.proposers import State

STATIONARY = 1.25  # of the last two steps the slower takes at most so much longer
# What processes say when memory is gone: torch's allocator, the C++ library, Python, the kernel.
OUT_OF_MEMORY = (
    "out of memory",
    "want of memory",
    "can't allocate memory",
    "bad_alloc",
    "memoryerror",
)


class RunnerFailedError(RuntimeError):
    """A point's process died, hung or reported an error; the message says why."""


class OutOfTimeError(RuntimeError):
    """The budget ended in the middle of a trial; nothing is said of the point."""


@dataclass(frozen=True)
class Step:
    """One step of a runner: what it did, in how long, and whether it was sound."""

    items: float
    seconds: float
    memory: float | None = None
    finite: bool = True


class Runner(Protocol):
    """A point's process, asleep between its turns."""

    def begin(self, patience: float) -> None:
        """Wait until it is built. Raises RunnerFailedError."""

    def steps(self, count: int, patience: float) -> list[Step]:
        """Do so many steps. Raises RunnerFailedError."""

    def end(self, at_once: bool = False) -> None:
        """End the process; harmless when it has ended."""


@dataclass(frozen=True)
class Measurement:
    """What came of a point: logarithms of its rate over the start's, by round, and its peak."""

    state: State
    logs: tuple[float, ...] = ()
    memory: float | None = None
    rate: float | None = None
    seconds: float = 0.0
    load: float = 0.0
    why: str | None = None

    @property
    def value(self) -> float | None:
        return statistics.median(self.logs) if self.logs else None


def even(steps: Sequence[Step]) -> bool:
    last = [s.seconds / s.items for s in steps[1:]][-2:]
    return len(last) == 2 and max(last) <= STATIONARY * min(last)


def sound(steps: list[Step]) -> list[Step]:
    """The steps, if each is one that can be counted."""
    for s in steps:
        if not s.finite:
            raise RunnerFailedError("its loss is not a finite number")
        if not (math.isfinite(s.items) and s.items > 0 and s.seconds > 0):
            raise RunnerFailedError(f"a step did {s.items} items, and a speed needs some")
    return steps
