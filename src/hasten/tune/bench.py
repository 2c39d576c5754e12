"""Measures points: each in its own process, in turns with a reference process.

The reference stays alive; the first one is the start. A point's process is started,
warmed up, and then takes turns with the reference (`hasten.measure.schedule`). The
ratio within a pass counts, so a machine that slows down slows both.

A point that is far better, and needs no more memory, becomes the reference. Later
points then don't wait for slow turns, and are compared with the point to beat. First
the start is compared with a second copy of itself: the difference between them is
noise. A round that other programs disturbed is repeated once. If the reference fails
during a comparison, or is cut off, it is started again for the next one. At the end the
best few take turns among themselves.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hasten.errors import InputError
from hasten.machine.processes import LoadMeter
from hasten.measure.elimination import eliminate
from hasten.measure.schedule import (
    OutOfTimeError,
    Turn,
    VariantProcess,
    peak_of,
    run_round,
)
from hasten.measure.workers import Worker, WorkerError
from hasten.tune.space import Point

ROUNDS = 3  # of a trial
NOISE_ROUNDS = 4
HOPELESS = 0.15  # below the best after one round, as a logarithm: no second round
FAR_BETTER = 0.4  # than the process that stays: takes its place
FOREIGN = 0.35  # share of the machine that others may take in a round that isn't done again
LEAST_NOISE = 0.005
WARMUP, MOST_WARMUP = 2, 8  # steps before a round
SHORT = 1.0  # seconds of a warm-up at least, and of a round: short steps are the more
LONG, FEWEST_STEPS = 2.5, 2  # seconds beyond which a round has fewer steps, and how few
MOST_TIMES = 4  # as many steps for short ones
PASSES = 4  # of a round: a machine's speed changes within a second, so turns are short and many

State = Literal["ok", "out of memory", "failed", "pruned"]  # pruned: of trainings alone


@dataclass(frozen=True)
class Measurement:
    """Results of a point: logarithms of its rate over the start's, by round, and its peak."""

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


@dataclass(frozen=True)
class PairedRound:
    """A point's result in a round.

    It has the logarithm of its rate over the other's, its rate and peak, and the share of
    the machine that other programs used.
    """

    log: float
    rate: float
    memory: float | None
    load: float


class ReferencePair:
    """The reference process, and the point that is compared with it.

    Args:
        start: starts the worker of a point.
        first: the point with which all are compared.
        cores: cores of the machine, for the load by other programs.
        steps: steps of a round; several times as many if they are short, fewer if they are
            long.
        seed: seed of the order of turns.
        clock: returns the time, in seconds; deadlines refer to it.
        together: number of steps that a turn never splits, because ranks may communicate
            only once in so many steps.
    """

    def __init__(
        self,
        start: Callable[[Point], Worker],
        first: Point,
        cores: int,
        steps: int = 4,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        together: int = 1,
    ) -> None:
        self._start, self._first, self._cores = start, first, cores
        self._steps, self._together = steps, together
        self._draw, self._clock, self._deadline = random.Random(seed), clock, math.inf
        self._base: VariantProcess | None = None  # the process that stays
        self.beside, self.above = first, 0.0  # its point, and the logarithm over the start's rate
        self.start_seconds = 0.0  # of the start's processes, to build and warm up
        self.step_seconds = 0.0  # of the process that stays
        self.memory: float | None = None  # its peak
        self.rate = 0.0  # its items per second

    def __enter__(self) -> ReferencePair:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, kill: bool = False) -> None:
        """End the process that stays, ``kill`` at once; `measure` starts another."""
        if self._base is not None:
            self._base.worker.close(kill=kill)
            self._base = None

    def open(self, deadline: float) -> None:
        """Start the process that stays: the start's, or what took its place.

        Raises:
            InputError: it fails, or its steps are no numbers.
            OutOfTimeError: it isn't ready by the deadline.
        """
        self._deadline = deadline
        base = self._base = self._variant(self.beside)
        try:
            self._warm_up(base)
        except OutOfTimeError:
            self.close(kill=True)
            raise
        except WorkerError as error:
            if self.beside == self._first:
                raise InputError(
                    f"tune: the job fails as it is, before any change: {error}"
                ) from error
            self.close(kill=True)
            self.beside, self.above = self._first, 0.0
            self.open(deadline)
            return
        self.step_seconds = base.step_seconds
        if self.beside == self._first:
            self.start_seconds = base.start_seconds
            self.rate, self.memory = Turn(base.warm[-2:]).rate, base.peak

    def noise(self, deadline: float, enough: float = math.inf) -> float:
        """Standard deviation of a round's ratio between two copies of the start, a logarithm.

        No round begins after ``enough`` once there are two.

        Raises:
            InputError: the second copy fails.
            OutOfTimeError: the deadline came before two rounds were over.
        """
        measurement = self.measure(self._first, deadline, rounds=NOISE_ROUNDS, enough=enough)
        if measurement.state == "ok" and len(measurement.logs) < 2:
            raise OutOfTimeError
        if not measurement.logs:
            raise InputError(
                f"tune: a second copy of the job fails next to the first: {measurement.why}"
            )
        return max(math.sqrt(statistics.fmean(x * x for x in measurement.logs)), LEAST_NOISE)

    def measure(  # noqa: C901  # each way that a trial ends
        self,
        point: Point,
        deadline: float,
        best: float = -math.inf,
        rounds: int = ROUNDS,
        enough: float = math.inf,
    ) -> Measurement:
        """Runs one trial; a calm round far below ``best`` or far above all ends it early.

        Raises:
            InputError: the start's process failed during an earlier comparison, and now alone.
            OutOfTimeError: the deadline came before the first round was over.
        """
        self._deadline = deadline
        if self._base is None:
            self.open(deadline)
        assert self._base is not None
        began, variant, above = self._clock(), self._variant(point), self.above
        paired_rounds: list[PairedRound] = []
        is_complete = False
        try:
            self._warm_up(variant)
            if point == self._first:  # the first one may have waited for all imports
                self.start_seconds = min(self.start_seconds, variant.start_seconds)
            steps = min(self._length(variant), self._length(self._base))
            variant.again()  # both begin with the first records
            self._base.again()
            load = LoadMeter(self._cores)
            while len(paired_rounds) < rounds and self._clock() < deadline:
                paired_rounds.append(last := self._calm_round(variant, steps, load))
                hopeless = above + last.log < best - HOPELESS
                if last.load <= FOREIGN and (hopeless or last.log > FAR_BETTER):
                    break  # what others disturbed, twice by now, decides nothing by itself
                if len(paired_rounds) >= 2 and self._clock() > enough:
                    break
            is_complete = True
        except OutOfTimeError:
            if not paired_rounds:
                raise  # else the rounds that were over count
        except WorkerError as error:
            state: State = "out of memory" if error.out_of_memory else "failed"
            return Measurement(state, seconds=self._clock() - began, why=str(error))
        finally:
            if not (is_complete and self._takes_over(variant, point, paired_rounds)):
                variant.worker.close(kill=not is_complete)
        if not paired_rounds:
            raise OutOfTimeError
        return Measurement(
            "ok",
            tuple(above + one.log for one in paired_rounds),
            _peak(variant, paired_rounds),
            statistics.median(one.rate for one in paired_rounds),
            self._clock() - began,
            max(one.load for one in paired_rounds),
        )

    def side_by_side(
        self, values: Mapping[Point, float], deadline: float
    ) -> dict[Point, tuple[float, ...]]:
        """Runs the points' processes in turns, all alive, until one remains or time is up.

        The reference process ends. See `eliminate`; ``values`` are the results of the trials.

        Returns:
            Passes by point. Points that failed to start are missing; if time was too short, all
            are.
        """
        self.close()
        self._deadline = deadline
        variants = {point: self._variant(point) for point in values}
        try:
            for point, variant in tuple(variants.items()):  # all are being built meanwhile
                try:
                    self._warm_up(variant)
                except OutOfTimeError:
                    return {}
                except WorkerError:
                    variants.pop(point).worker.close(kill=True)
            for variant in variants.values():
                variant.again()  # all at the same examples from here on
            passes = self._passes(min(map(self._length, variants.values()), default=self._together))
            log_ratios = eliminate(variants, values, passes, self._draw, self._cores)
            return {point: logs for point, logs in log_ratios.items() if logs}
        finally:
            for variant in variants.values():
                variant.worker.close(kill=True)

    def _variant(self, point: Point) -> VariantProcess:
        return VariantProcess(
            self._start(point), lambda: self._deadline - self._clock(), clock=self._clock
        )

    def _warm_up(self, variant: VariantProcess) -> None:
        """Built, and its steps alike: a compiled graph takes some until it runs."""
        variant.begin(WARMUP, MOST_WARMUP, SHORT)
        _checked(Turn(variant.warm))

    def _length(self, variant: VariantProcess) -> int:
        """Steps of a round, after a warm-up; fewer if they are long.

        More rounds give more information than longer rounds.
        """
        one = statistics.median(float(step["step_seconds"]) for step in variant.warm[-2:])
        times = min(max(math.ceil(SHORT / (self._steps * one)), 1), MOST_TIMES)
        fewest = max(FEWEST_STEPS, self._together, round(LONG / one))
        return times * min(self._steps, fewest)

    def _passes(self, count: int) -> list[int]:
        """The steps of a round, dealt to the turns of its passes."""
        units = count // self._together
        most = min(PASSES, units)
        return [self._together * (units * (n + 1) // most - units * n // most) for n in range(most)]

    def _takes_over(
        self, variant: VariantProcess, point: Point, paired_rounds: list[PairedRound]
    ) -> bool:
        """Makes a far better variant the new reference.

        A variant with a larger peak doesn't become the reference. It would leave less memory
        for those that are compared with it.
        """
        memory = _peak(variant, paired_rounds)
        larger = memory is not None and self.memory is not None and memory > self.memory
        gain = statistics.median(one.log for one in paired_rounds) if paired_rounds else -math.inf
        if larger or gain < FAR_BETTER:
            return False
        self.close()
        self._base, self.beside, self.above = variant, point, self.above + gain
        self.step_seconds = variant.step_seconds
        return True

    def _calm_round(self, variant: VariantProcess, steps: int, load: LoadMeter) -> PairedRound:
        """A round, once more if others disturbed it."""
        paired_round = self._round(variant, steps, load)
        again = 2 * steps * self.step_seconds
        if paired_round.load <= FOREIGN or self._clock() + again > self._deadline:
            return paired_round
        return min(paired_round, self._round(variant, steps, load), key=lambda one: one.load)

    def _round(self, variant: VariantProcess, steps: int, load: LoadMeter) -> PairedRound:
        assert self._base is not None
        both = {"own": variant, "other": self._base}
        turns: dict[str, list[Turn]] = {name: [] for name in both}
        for name, answer in run_round(both, self._passes(steps), self._draw, load):
            try:
                turns[name].append(_checked(answer))
            except WorkerError as error:
                if self._base.cut_off:  # it would answer late, for another turn
                    self.close(kill=True)
                raise error if name == "own" else self._failed_beside(error) from None
        pairs = zip(turns["own"], turns["other"], strict=True)
        every = [step for turn in turns["own"] for step in turn.steps]
        return PairedRound(
            statistics.median(
                math.log(variant_turn.rate / other.rate) for variant_turn, other in pairs
            ),
            statistics.median(turn.rate for turn in turns["own"]),
            peak_of(every),
            max(map(load.share, both)),
        )

    def _failed_beside(self, error: WorkerError) -> WorkerError:
        if isinstance(error, OutOfTimeError):
            return error
        self.close(kill=True)
        first = self.beside == self._first
        who = "the start's process" if first else "the process it was compared with"
        return WorkerError(f"{who} failed beside it: {error}")


def turn_steps(most: int, step_seconds: float, together: int = 1) -> int:
    """Steps of a turn of the final comparison, about a second of the start: short turns see one
    machine.
    """
    if step_seconds <= 0:
        return most
    return max(together, min(most, math.ceil(SHORT / step_seconds)))


def _peak(variant: VariantProcess, paired_rounds: list[PairedRound]) -> float | None:
    peaks = [variant.peak, *(one.memory for one in paired_rounds)]
    return max((peak for peak in peaks if peak), default=None)


def _checked(turn: Turn | WorkerError) -> Turn:
    """The turn, if there is one, and each of its steps can be counted."""
    if isinstance(turn, WorkerError):
        raise turn
    for step in turn.steps:
        loss, items, seconds = step.get("loss"), step["tokens"], step["step_seconds"]
        if loss is not None and not math.isfinite(loss):
            raise WorkerError("its loss is not a finite number")
        if not (math.isfinite(items) and items > 0 and seconds > 0):
            raise WorkerError(f"a step did {items} items, and a speed needs some")
    return turn
