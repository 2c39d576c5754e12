"""Where points are measured: each in a process of its own, taking turns with one that stays alive.

At first that one is the start's. A point's process is started, warmed up, and then takes turns with
it, in an order drawn anew each round; what counts is the ratio within a round, so a machine that
slows down slows both. A point that is far better, and needs no more memory, takes the start's
place: the next ones don't wait for slow turns any more, and are compared with what they have to
beat. First the start is measured against a second copy of itself: what differs between them is
noise. A round that others disturbed is done once more. Where the process that stays fails beside a
point, or is cut off, it is started anew for the next one.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

from hasten.errors import InputError
from hasten.machine.processes import foreign_share, look
from hasten.measure.turns import (
    Beside,
    Measurement,
    OutOfTimeError,
    Runner,
    State,
    Step,
    Turns,
    rate,
)
from hasten.measure.workers import WorkerError
from hasten.tune.space import Point

ROUNDS = 3  # of a trial
NOISE_ROUNDS = 4
HOPELESS = 0.15  # below the best after one round, as a logarithm: no second round
FAR_BETTER = 0.4  # than the process that stays: takes its place
FOREIGN = 0.35  # share of the machine that others may take in a round that isn't done again
LEAST_NOISE = 0.005


class ReferencePair:
    """The process that stays, and whoever is measured beside it.

    Args:
        start: starts the process of a point.
        first: the point to which all are compared.
        cores: of the machine, for the share that others take.
        steps: of a round.
        seed: of the order of turns.
        clock: tells the time, in seconds.
        together: steps that no turn parts.
    """

    def __init__(
        self,
        start: Callable[[Point], Runner],
        first: Point,
        cores: int,
        steps: int = 4,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        together: int = 1,
    ) -> None:
        self.start, self._first, self._cores = start, first, cores
        self.turns = Turns(steps, clock, together)
        self.draw, self._clock = random.Random(seed), clock
        self._base: Runner | None = None  # the process that stays
        self.beside, self.above = first, 0.0  # its point, and the logarithm over the start's rate
        self._count = steps  # of its rounds
        self.start_seconds = 0.0  # of the first process, to build and warm up
        self.step_seconds = 0.0  # of the process that stays
        self.memory: float | None = None  # its peak
        self.rate = 0.0  # its items per second

    def __enter__(self) -> ReferencePair:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that stays."""
        if self._base is not None:
            self._base.end()
            self._base = None

    def _drop(self) -> None:
        """End it at once; `measure` starts another."""
        if self._base is not None:
            self._base.end(at_once=True)
            self._base = None

    def ready(self, deadline: float) -> None:
        """Have a process that stays (see `open`)."""
        if self._base is None:
            self.open(deadline)

    def open(self, deadline: float) -> None:
        """Start the process that stays: the start's, or what took its place.

        Raises:
            InputError: it fails, or its steps are no numbers.
            OutOfTimeError: it isn't ready by the deadline.
        """
        began = self._clock()
        self._base = self.start(self.beside)
        try:
            warm = self.turns.warmed(self._base, deadline)
        except WorkerError as error:
            if self.beside != self._first:
                self._drop()
                self.beside, self.above = self._first, 0.0
                self.open(deadline)
                return
            raise InputError(f"tune: the job fails as it is, before any change: {error}") from error
        except OutOfTimeError:
            self._drop()
            raise
        self.step_seconds = statistics.median(s.seconds for s in warm[-2:])
        self._count = self.turns.length(warm)
        if self.beside == self._first:
            self.start_seconds = self._clock() - began
            self.rate = statistics.median(s.items / s.seconds for s in warm[-2:])
            self.memory = max((s.memory for s in warm if s.memory), default=None)

    def noise(self, deadline: float, enough: float = math.inf) -> float:
        """Standard deviation of a round's ratio between two copies of the start, a logarithm.

        No round begins after ``enough`` once there are two.

        Raises:
            InputError: the second copy fails.
            OutOfTimeError: the deadline came before two rounds were over.
        """
        found = self.measure(self._first, deadline, rounds=NOISE_ROUNDS, enough=enough)
        if found.state == "ok" and len(found.logs) < 2:
            raise OutOfTimeError
        if not found.logs:
            raise InputError(f"tune: a second copy of the job fails beside the first: {found.why}")
        return max(math.sqrt(statistics.fmean(x * x for x in found.logs)), LEAST_NOISE)

    def measure(
        self,
        point: Point,
        deadline: float,
        best: float = -math.inf,
        rounds: int = ROUNDS,
        enough: float = math.inf,
    ) -> Measurement:
        """One trial; a calm round that leaves it far below ``best``, or far above all, ends it.

        Raises:
            InputError: the start's process failed beside an earlier point, and now by itself.
            OutOfTimeError: the deadline came before the first round was over.
        """
        self.ready(deadline)
        began = self._clock()
        runner, logs, above = self.start(point), list[float](), self.above
        memory, rates, loads = None, list[float](), list[float]()
        whole = False
        try:
            warm = self.turns.warmed(runner, deadline)
            memory = max((s.memory for s in warm if s.memory), default=None)
            count = min(self.turns.length(warm), self._count)
            self._same_records(runner)
            while len(logs) < rounds and self._clock() < deadline:
                found, load = self._calm_round(runner, count, deadline)
                logs.append(above + found.log)
                rates.append(found.rate)
                loads.append(load)
                memory = max((m for m in (memory, found.memory) if m), default=None)
                if load <= FOREIGN and (logs[-1] < best - HOPELESS or found.log > FAR_BETTER):
                    break  # what others disturbed, twice by now, decides nothing by itself
                if len(logs) >= 2 and self._clock() > enough:
                    break
            whole = True
        except WorkerError as error:
            state: State = "out of memory" if error.out_of_memory else "failed"
            return Measurement(state, seconds=self._clock() - began, why=str(error))
        except OutOfTimeError:
            if not logs:
                raise  # else the rounds that were over count
        finally:
            if not (whole and self._takes_over(runner, point, logs, memory, warm)):
                runner.end(at_once=not whole)
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

    def _same_records(self, runner: Runner) -> None:
        """Both begin with the first: a step of others takes longer, or less long."""
        assert self._base is not None  # `measure` has opened it
        runner.again()
        self._base.again()

    def _takes_over(
        self,
        runner: Runner,
        point: Point,
        logs: Sequence[float],
        memory: float | None,
        warm: Sequence[Step],
    ) -> bool:
        """Let a runner stay in the place of the one that stayed, where it is far better.

        One with a larger peak doesn't: there would be less for those that are measured beside it.
        """
        larger = memory is not None and self.memory is not None and memory > self.memory
        if larger or not logs or statistics.median(logs) - self.above < FAR_BETTER:
            return False
        self.close()
        self._base, self.beside, self.above = runner, point, statistics.median(logs)
        self._count = self.turns.length(warm)
        self.step_seconds = statistics.median(s.seconds for s in warm[-2:])
        return True

    def _calm_round(self, runner: Runner, count: int, deadline: float) -> tuple[Beside, float]:
        """A round, once more if others disturbed it, and the share that they took."""
        found = self._round(runner, count, deadline)
        if found[1] <= FOREIGN or self._clock() + 2 * self._count * self.step_seconds > deadline:
            return found
        return min(found, self._round(runner, count, deadline), key=lambda f: f[1])

    def _round(self, runner: Runner, count: int, deadline: float) -> tuple[Beside, float]:
        before = look()
        found = self._turns_of_both(runner, count, deadline)
        own = [step for mine, _ in found for step in mine]
        beside = Beside(
            statistics.median(math.log(rate(mine) / rate(other)) for mine, other in found),
            rate(own),
            max((s.memory for s in own if s.memory), default=None),
        )
        return beside, foreign_share(before, look(), self._cores)

    def _turns_of_both(self, runner: Runner, count: int, deadline: float) -> list[list[list[Step]]]:
        """By pass; the one that stays, cut off, would answer late, for another turn."""
        assert self._base is not None  # `measure` has opened it
        try:
            return self.turns.round((runner, self._base), count, deadline, self.draw)
        except WorkerError as error:
            if error.source is not self._base:
                raise
            self._drop()
            first = self.beside == self._first
            who = "the start's process" if first else "the process it was compared with"
            raise WorkerError(f"{who} failed beside it: {error}") from error
        except OutOfTimeError:
            self._drop()
            raise
