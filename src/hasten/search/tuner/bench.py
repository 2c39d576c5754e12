"""Where points are measured: each in a process of its own, taking turns with the start's.

The start's process stays alive for the whole study. A point's process is started, warmed up, and
then takes turns with it, in an order drawn anew each round; what counts is the ratio within a
round, so a machine that slows down slows both. First the start is measured against a second copy
of itself: what differs between them is noise. A round that others disturbed is done once more.
Where the start's process fails beside a point, or is cut off, it is started anew for the next one.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hasten.errors import InputError
from hasten.evidence.load import foreign_share, look
from hasten.search.tuner.proposers import State
from hasten.search.tuner.space import Point

WARMUP, MOST_WARMUP = 2, 8  # steps before a turn counts
STATIONARY = 1.25  # of the last two steps the slower takes at most so much longer
ROUNDS = 3  # of a trial
NOISE_ROUNDS = 4
HOPELESS = 0.15  # below the best after one round, as a logarithm: no second round
FOREIGN = 0.35  # share of the machine that others may take in a round that isn't done again
LEAST_NOISE = 0.005
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


class Bench:
    """The start's process, and whoever is measured beside it.

    Args:
        start: starts the process of a point.
        first: the point to which all are compared.
        cores: of the machine, for the share that others take.
        steps: of a turn.
        seed: of the order of turns.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        start: Callable[[Point], Runner],
        first: Point,
        cores: int,
        steps: int = 4,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._first, self._cores, self._steps = start, first, cores, steps
        self._order, self._clock = random.Random(seed), clock
        self._base: Runner | None = None
        self.start_seconds = 0.0  # of the first process, to build and warm up
        self.step_seconds = 0.0  # of the first process
        self.memory: float | None = None  # its peak
        self.rate = 0.0  # its items per second

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the start's process."""
        if self._base is not None:
            self._base.end()
            self._base = None

    def _drop(self) -> None:
        """End the start's process at once; `measure` starts another."""
        if self._base is not None:
            self._base.end(at_once=True)
            self._base = None

    def open(self, deadline: float) -> None:
        """Start the first process.

        Raises:
            InputError: it fails, or its steps are no numbers.
            OutOfTimeError: it isn't ready by the deadline.
        """
        began = self._clock()
        self._base = self._start(self._first)
        try:
            warm = self._warmed(self._base, deadline)
        except RunnerFailedError as error:
            raise InputError(f"tune: the job fails as it is, before any change: {error}") from error
        except OutOfTimeError:
            self._drop()
            raise
        self.start_seconds = self._clock() - began
        self.step_seconds = statistics.median(s.seconds for s in warm[-2:])
        self.rate = statistics.median(s.items / s.seconds for s in warm[-2:])
        self.memory = max((s.memory for s in warm if s.memory), default=None)

    def noise(self, deadline: float) -> float:
        """Standard deviation of a round's ratio between two copies of the start, a logarithm.

        Raises:
            InputError: the second copy fails.
            OutOfTimeError: the deadline came before two rounds were over.
        """
        found = self.measure(self._first, deadline, rounds=NOISE_ROUNDS)
        if found.state == "ok" and len(found.logs) < 2:
            raise OutOfTimeError
        if not found.logs:
            raise InputError(f"tune: a second copy of the job fails beside the first: {found.why}")
        return max(math.sqrt(statistics.fmean(x * x for x in found.logs)), LEAST_NOISE)

    def measure(
        self, point: Point, deadline: float, best: float = -math.inf, rounds: int = ROUNDS
    ) -> Measurement:
        """One trial; it ends after a round that leaves it far below ``best``.

        Raises:
            InputError: the start's process failed beside an earlier point, and now by itself.
            OutOfTimeError: the deadline came before the first round was over.
        """
        if self._base is None:
            self.open(deadline)
        began = self._clock()
        runner, logs = self._start(point), list[float]()
        memory, rates, loads = None, list[float](), list[float]()
        sound = False
        try:
            warm = self._warmed(runner, deadline)
            memory = max((s.memory for s in warm if s.memory), default=None)
            while len(logs) < rounds and self._clock() < deadline:
                log, rate, load, peak = self._calm_round(runner, deadline)
                logs.append(log)
                rates.append(rate)
                loads.append(load)
                memory = max((m for m in (memory, peak) if m), default=None)
                if log < best - HOPELESS:
                    break
            sound = True
        except RunnerFailedError as error:
            text = str(error)
            gone = any(word in text.lower() for word in OUT_OF_MEMORY)
            state: State = "out of memory" if gone else "failed"
            return Measurement(state, seconds=self._clock() - began, why=text)
        except OutOfTimeError:
            if not logs:
                raise  # else the rounds that were over count
        finally:
            runner.end(at_once=not sound)
        if not logs:
            raise OutOfTimeError
        return Measurement(
            "ok",
            tuple(logs),
            memory,
            statistics.median(rates),
            self._clock() - began,
            max(loads),
        )

    def _calm_round(
        self, runner: Runner, deadline: float
    ) -> tuple[float, float, float, float | None]:
        """A round, once more if others disturbed it: log ratio, rate, load, peak."""
        found = self._round(runner, deadline)
        if found[2] <= FOREIGN or self._clock() + 2 * self._steps * self.step_seconds > deadline:
            return found
        return min(found, self._round(runner, deadline), key=lambda f: f[2])

    def _round(self, runner: Runner, deadline: float) -> tuple[float, float, float, float | None]:
        before, rates = look(), {}
        peak = None
        for mine in self._order.sample([True, False], 2):
            steps = self._turn(runner, deadline) if mine else self._turn_of_start(deadline)
            rates[mine] = statistics.median(s.items / s.seconds for s in steps)
            if mine:
                peak = max((s.memory for s in steps if s.memory), default=None)
        load = foreign_share(before, look(), self._cores)
        return math.log(rates[True] / rates[False]), rates[True], load, peak

    def _turn(self, runner: Runner, deadline: float) -> list[Step]:
        return _sound(self._within(runner.steps, deadline)(self._steps))

    def _turn_of_start(self, deadline: float) -> list[Step]:
        """The start's turn; a process that was cut off would answer late, for another turn."""
        assert self._base is not None  # `measure` has opened it
        try:
            return self._turn(self._base, deadline)
        except RunnerFailedError as error:
            self._drop()
            raise RunnerFailedError(f"the start's process failed beside it: {error}") from error
        except OutOfTimeError:
            self._drop()
            raise

    def _warmed(self, runner: Runner, deadline: float) -> list[Step]:
        """Built, and its steps even: a compiled graph takes some until it runs."""
        try:
            runner.begin(self._left(deadline))
        except RunnerFailedError:
            self._left(deadline)  # a process that was cut off by the end of time didn't fail
            raise
        do, found = self._within(runner.steps, deadline), list[Step]()
        while len(found) < WARMUP or (len(found) < MOST_WARMUP and not _even(found)):
            found += _sound(do(1))
        return found

    def _within(
        self, act: Callable[[int, float], list[Step]], deadline: float
    ) -> Callable[[int], list[Step]]:
        def bounded(count: int) -> list[Step]:
            try:
                return act(count, self._left(deadline))
            except RunnerFailedError:
                self._left(deadline)
                raise

        return bounded

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise OutOfTimeError
        return left


def _even(steps: Sequence[Step]) -> bool:
    last = [s.seconds / s.items for s in steps[1:]][-2:]
    return len(last) == 2 and max(last) <= STATIONARY * min(last)


def _sound(steps: list[Step]) -> list[Step]:
    """The steps, if each is one that can be counted."""
    for s in steps:
        if not s.finite:
            raise RunnerFailedError("its loss is not a finite number")
        if not (math.isfinite(s.items) and s.items > 0 and s.seconds > 0):
            raise RunnerFailedError(f"a step did {s.items} items, and a speed needs some")
    return steps
