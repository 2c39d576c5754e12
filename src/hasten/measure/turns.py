"""What a bench and its runners tell each other: steps, measurements, and what went wrong.

`Turns` takes runners through their warm-up and their turns, with a deadline for all of it. Where a
process can be stopped within its turn, the runners of a round take their turns abreast: a machine's
speed changes within a step, and parts of a step that alternate share what slows it.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hasten.measure.schedule import SLICE_SECONDS as PART
from hasten.measure.schedule import run_in_slices
from hasten.measure.workers import WorkerError

State = Literal["ok", "out of memory", "failed"]
WARMUP, MOST_WARMUP = 2, 8  # steps before a round
SHORT = (
    1.0  # seconds; a shorter warm-up goes on, and a round's steps are as many as make it so long
)
LONG, FEWEST_STEPS = 2.5, 2  # seconds beyond which a round has fewer steps, and how few
MOST_TIMES = 4  # as many steps for short ones
PASSES = 4  # of a round: a machine's speed changes within a second, so turns are short and many
STATIONARY = 1.25  # of the last two steps the slower takes at most so much longer


class OutOfTimeError(RuntimeError):
    """The budget ended in the middle of a trial; nothing is said of the point."""


@dataclass(frozen=True)
class Step:
    """One step of a runner: what it did, in how long, and whether it was sound."""

    items: float
    seconds: float
    memory: float | None = None
    finite: bool = True


class Parts(Protocol):
    """A turn that is stopped and goes on, with all that works for it."""

    @property
    def pace(self) -> float:
        """Seconds that a step took lately."""

    def order(self, count: int) -> None:
        """Have so many steps ahead. Raises WorkerError."""

    def go_on(self, seconds: float) -> list[Step] | None:
        """Work at them for so long at most; the steps, once all are done.

        Their seconds are those of the parts. Raises WorkerError.
        """


class Runner(Protocol):
    """A point's process, asleep between its turns."""

    @property
    def parts(self) -> Parts | None:
        """How it does a turn in parts; None where it can't be stopped within one."""

    def begin(self, patience: float) -> None:
        """Wait until it is built. Raises WorkerError."""

    def steps(self, count: int, patience: float) -> list[Step]:
        """Do so many steps. Raises WorkerError."""

    def again(self) -> None:
        """Let the next steps begin with the data's first record, if whoever runs can do that.

        Steps differ by what is in their records: those of two runners are compared at the same.
        """

    def end(self, at_once: bool = False) -> None:
        """End the process; harmless when it has ended."""


@dataclass(frozen=True)
class Beside:
    """A runner's part of a round: rate over another's as a logarithm, its own rate, its peak."""

    log: float
    rate: float
    memory: float | None


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


def rate(steps: Sequence[Step]) -> float:
    """Items per second in the middle of some steps."""
    return statistics.median(s.items / s.seconds for s in steps)


def even(steps: Sequence[Step]) -> bool:
    last = [s.seconds / s.items for s in steps[1:]][-2:]
    return len(last) == 2 and max(last) <= STATIONARY * min(last)


def sound(steps: list[Step]) -> list[Step]:
    """The steps, if each is one that can be counted."""
    for s in steps:
        if not s.finite:
            raise WorkerError("its loss is not a finite number")
        if not (math.isfinite(s.items) and s.items > 0 and s.seconds > 0):
            raise WorkerError(f"a step did {s.items} items, and a speed needs some")
    return steps


class Turns:
    """Takes runners through their warm-up and their turns, none of it beyond a deadline.

    Its methods raise WorkerError for a runner that failed before the deadline, and
    OutOfTimeError for one that was cut off by it.

    Args:
        steps: of a round; several times as many where they are short, fewer where they are long.
        together: steps that no turn parts, since ranks may exchange once in so many.
        clock: tells the time, in seconds; deadlines are by it.
    """

    def __init__(self, steps: int, clock: Callable[[], float], together: int = 1) -> None:
        self._steps, self._clock, self._together = steps, clock, together

    def warmed(self, runner: Runner, deadline: float) -> list[Step]:
        """Built, and its steps even: a compiled graph takes some until it runs."""
        self._within(runner.begin, deadline)
        found: list[Step] = []
        while len(found) < WARMUP or (len(found) < MOST_WARMUP and not _warm(found)):
            found += self.turn(runner, 1, deadline)
        return found

    def length(self, warm: Sequence[Step]) -> int:
        """Steps of a round, after a warm-up."""
        one = statistics.median(s.seconds for s in warm[-2:])
        times = min(max(math.ceil(SHORT / (self._steps * one)), 1), MOST_TIMES)
        return times * round_steps(self._steps, one, self._together)

    def passes(self, count: int) -> list[int]:
        """The steps of a round, dealt to the turns of its passes."""
        units = count // self._together
        most = min(PASSES, units)
        return [self._together * (units * (n + 1) // most - units * n // most) for n in range(most)]

    def round(
        self, runners: Sequence[Runner], count: int, deadline: float, draw: random.Random
    ) -> list[list[list[Step]]]:
        """By pass what each has done; all do so many steps, in a turn of each pass.

        Every second pass has the order of the one before backwards, so that what slows the machine
        for a while, or steadily, slows all of them. Of a failure it is told whose it was.
        """
        order = draw.sample(range(len(runners)), len(runners))
        found = []
        for steps in self.passes(count):
            taken = self._pass([runners[place] for place in order], steps, deadline)
            found.append([taken[order.index(place)] for place in range(len(runners))])
            order.reverse()
        return found

    def _pass(self, runners: Sequence[Runner], count: int, deadline: float) -> list[list[Step]]:
        parts = [(runner, runner.parts) for runner in runners]
        stoppable = [(runner, own) for runner, own in parts if own is not None]
        if len(stoppable) == len(runners):
            return self._abreast(stoppable, count, deadline)
        found = []
        for runner in runners:
            with _named(runner):
                found.append(self.turn(runner, count, deadline))
        return found

    def _abreast(
        self, runners: Sequence[tuple[Runner, Parts]], count: int, deadline: float
    ) -> list[list[Step]]:
        """In slices. Where one fails, the others end their turn first: none answers late."""
        own = {n: _Within(self, parts, deadline) for n, (_, parts) in enumerate(runners)}
        found, failed = run_in_slices(own, count, PART)
        for place, error in failed.items():
            error.source = runners[place][0]
            raise error
        return [found[place] for place in range(len(runners))]

    def part(self, parts: Parts, seconds: float, deadline: float) -> list[Step] | None:
        """A slice of a turn, no longer than the deadline allows."""
        found = self._within(lambda left: parts.go_on(min(seconds, left)), deadline)
        return None if found is None else sound(found)

    def turn(self, runner: Runner, count: int, deadline: float) -> list[Step]:
        return sound(self._within(lambda left: runner.steps(count, left), deadline))

    def _within(self, act: Callable[[float], Any], deadline: float) -> Any:
        left = self._left(deadline)
        try:
            return act(left)
        except WorkerError:
            self._left(deadline)  # a process that was cut off by the end of time didn't fail
            raise

    def _left(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise OutOfTimeError
        return left


@dataclass(frozen=True)
class _Within:
    """Slices of a runner that end with a deadline."""

    turns: Turns
    parts: Parts
    deadline: float

    @property
    def pace(self) -> float:
        return self.parts.pace

    def order(self, count: int) -> None:
        self.parts.order(count)

    def go_on(self, seconds: float) -> list[Step] | None:
        return self.turns.part(self.parts, seconds, self.deadline)


@contextlib.contextmanager
def _named(runner: Runner) -> Iterator[None]:
    """Say of a failure whose it is."""
    try:
        yield
    except WorkerError as error:
        error.source = runner
        raise


def round_steps(most: int, step_seconds: float, together: int = 1) -> int:
    """Steps of a round: of long ones fewer, since more rounds say more than longer ones."""
    if step_seconds <= 0:
        return most
    return min(most, max(FEWEST_STEPS, together, round(LONG / step_seconds)))


def duel_steps(most: int, step_seconds: float, together: int = 1) -> int:
    """Steps of a turn of the duel, about a second of the start: short turns see one machine."""
    if step_seconds <= 0:
        return most
    return max(together, min(most, math.ceil(SHORT / step_seconds)))


def _warm(steps: Sequence[Step]) -> bool:
    return even(steps) and math.fsum(s.seconds for s in steps) >= SHORT
