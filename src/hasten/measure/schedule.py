"""Schedules workers: each is warmed up, then all do the same steps, round by round.

  1. A worker's process builds its job, and runs steps until two of them take equally
     long.
  2. In a round every worker runs a number of steps, in a new random order.
  3. A machine's speed changes within a second: other programs run, and its clock rate
     depends on heat and load. If all workers can be stopped within a request, a round is
     therefore cut into slices. Each worker runs for a quarter of a second, then the
     next one continues with its own steps. A slower worker has longer slices, and all
     finish together. Otherwise the workers run their full turns one after another.

A turn may take twenty times as long as the warm-up's steps predict, and at least a
minute, before the worker counts as hanging. For a start there is no prediction, and a
long timeout applies. Nothing waits beyond a deadline.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hasten.machine.processes import LoadMeter
from hasten.measure.workers import BUILD_SECONDS, Reply, Worker, WorkerError

SLICE_SECONDS = 0.25  # of the fastest worker
TIMEOUT_FACTOR = 20.0  # a busy machine makes single steps several times slower
LEAST_TIMEOUT = 60.0  # seconds
STATIONARY = 1.25  # of the last two steps the slower takes at most so much longer
Name = TypeVar("Name")


class OutOfTimeError(WorkerError):
    """The deadline came before the reply; it isn't a failure of the worker."""


@dataclass(frozen=True)
class Turn:
    """The steps that a worker did in one round.

    Args:
        steps: the steps that the worker reported.
        seconds: seconds of all of them; None: each step's own seconds count.
        load: the share of the machine that other programs used during the turn.
        joules: the energy used, if there is a counter.
    """

    steps: Sequence[Mapping[str, Any]]
    seconds: float | None = None
    load: float = 0.0
    joules: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The turn as the record of an experiment stores it."""
        load = round(self.load, 4)
        stored = {"steps": self.steps, "background_load": load, "joules": self.joules}
        return stored if self.seconds is None else {**stored, "seconds": self.seconds}


class VariantProcess:
    """A worker that takes turns, and the measurements of its steps.

    Its methods raise OutOfTimeError if the deadline cuts them off, and WorkerError if the
    worker fails before it.

    Args:
        worker: a worker that was just started.
        time_left: returns the seconds until the deadline.
        note: stores an event of `hasten.measure.record` and its details.
        patience: the longest wait for a reply; None: derived from measured steps.
        clock: returns the time, in seconds.
    """

    def __init__(
        self,
        worker: Worker,
        time_left: Callable[[], float] = lambda: math.inf,
        note: Callable[..., None] = lambda event, **details: None,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self._time_left, self.note = worker, time_left, note
        self._patience, self._clock, self._began = patience, clock, clock()
        self.warm: list[Mapping[str, Any]] = []  # steps before the first round
        self._graphs: list[int] = []  # compiled, after each of the last requests
        self.ready_seconds = 0.0  # to build
        self.evaluation_seconds = 0.0
        self._ahead, self._worked = 0, 0.0  # steps of its turn in slices, seconds worked at them
        self._last: Sequence[Mapping[str, Any]] = ()  # steps of its last turn

    def begin(self, least: int, most: int = 0, look: bool = False) -> None:
        """Wait until it is built, and warm it up (`warm_up`); ``look``: `evaluate` before that."""
        reply = self._within(self.worker.ready, self._patience or BUILD_SECONDS)
        self.ready_seconds = took = self._clock() - self._began
        self.note("start", startup_seconds=reply.get("startup_seconds", {}), seconds=took)
        if look:
            self.evaluate()
        self.warm_up(least, most)

    def warm_up(self, least: int, most: int = 0) -> None:
        """Runs ``least`` steps, and up to ``most`` while step times aren't stationary."""
        began, before, compiling = self._clock(), len(self.warm), 0.0
        while len(self.warm) < least or (len(self.warm) < most and not self.stationary):
            count = max(least - len(self.warm), 1)
            reply = self.ask("steps", BUILD_SECONDS, count=count)
            self.warm += reply["steps"]
            compiled = reply.get("compiled") or {"graphs": 0, "seconds": 0.0}
            self._graphs.append(compiled["graphs"])
            compiling += compiled["seconds"]
        if new := self.warm[before:]:
            took = self._clock() - began
            self.note("warmup", steps=new, seconds=took, compile_seconds=compiling)

    @property
    def stationary(self) -> bool:
        """Returns True if the last two steps took equally long and nothing was compiled.

        The time is per position, because padded batches differ in size. The first step never
        counts: it includes the cost of memory, kernels and the optimizer's state.
        """
        steps = self.warm[1:][-2:]
        last = [s["step_seconds"] / max(s.get("positions", s["tokens"]), 1) for s in steps]
        alike = len(last) == 2 and max(last) <= STATIONARY * min(last)
        return alike and len(set(self._graphs[-2:])) == 1

    @property
    def step_seconds(self) -> float:
        """Seconds of a warm-up step: the median of the later half."""
        seconds = [step["step_seconds"] for step in self.warm]
        return statistics.median(seconds[len(seconds) // 2 :]) if seconds else 0.0

    @property
    def pace(self) -> float:
        """Seconds of a step in its last turn, for its slices."""
        seconds = [step["step_seconds"] for step in self._last]
        return (statistics.median(seconds) if seconds else self.step_seconds) or 1.0

    @property
    def peak(self) -> int | None:
        """The most memory that it has used."""
        return peak_of(self.warm)

    def evaluate(self) -> None:
        """Its eval loss and its own metrics as they are now."""
        began, timeout = self._clock(), BUILD_SECONDS
        if self.evaluation_seconds:
            timeout = max(TIMEOUT_FACTOR * self.evaluation_seconds, LEAST_TIMEOUT)
        evaluation = self.ask("evaluate", timeout)
        self.evaluation_seconds = max(self.evaluation_seconds, self._clock() - began)
        names = ("tokens", "eval_loss", "pairs")
        noted = {name: evaluation[name] for name in names if name in evaluation}
        metrics = {k: v for k, v in evaluation.items() if k not in ("step", *noted)}
        self.note("evaluate", **noted, **({"metrics": metrics} if metrics else {}))

    def finish(self, samples: bool = True) -> None:
        """Stores the effects of its techniques and its model's samples; ends its training."""
        last = self.ask("finish", BUILD_SECONDS, samples=samples)
        keys = ("effective", "samples", "ledger", "peak_memory_bytes")
        self.note("finish", **{key: last[key] for key in keys if key in last})

    def whole_turn(self, count: int) -> Reply:
        """So many steps at once."""
        reply = self.ask("steps", self._timeout(count), count=count)
        self._last = reply["steps"]
        return reply

    def begin_slices(self, count: int) -> None:
        """Have so many steps ahead (`go_on`)."""
        self._ahead, self._worked = count, 0.0
        self.worker.submit("steps", count=count)

    def go_on(self, seconds: float) -> Reply | None:
        """Work at them for so long at most; the reply once all are done."""
        began = self._clock()
        reply: Reply | None = self._within(self.worker.run_for, seconds)
        self._worked += self._clock() - began
        if reply is not None:
            self._last = reply["steps"]
        elif self._worked > (timeout := self._timeout(self._ahead)):
            raise WorkerError(f"no answer within {timeout:.0f} s: it hangs")
        return reply

    def ask(self, op: str, timeout: float, **arguments: Any) -> Reply:
        """The reply to a request, no longer than the deadline allows."""
        wait = self._patience or timeout
        reply: Reply = self._within(lambda s: self.worker.request(op, s, **arguments), wait)
        return reply

    def _timeout(self, count: int) -> float:
        """How long so many steps may take before the worker counts as hanging."""
        if self._patience is not None or not self.warm:
            return self._patience or BUILD_SECONDS
        slowest: float = max(step["step_seconds"] for step in self.warm)
        return max(TIMEOUT_FACTOR * (count * self.step_seconds + slowest), LEAST_TIMEOUT)

    def _within(self, act: Callable[[float], Any], seconds: float) -> Any:
        seconds_left = self._time_left()
        try:
            if seconds_left > 0:
                return act(min(seconds, seconds_left))
        except WorkerError:
            if self._time_left() > 0:  # else it was cut off by the end of time, and didn't fail
                raise
        raise OutOfTimeError("the budget is used up")


def run_round(
    variants: Mapping[Name, VariantProcess],
    count: int,
    draw: random.Random,
    load: LoadMeter,
    *,
    slices: bool = True,
    joules: Callable[[], float | None] = lambda: None,
    before: Callable[[Name], None] = lambda name: None,
) -> Iterator[tuple[Name, Turn | WorkerError]]:
    """Runs one round: every variant does the same steps.

    Args:
        variants: the variants that take part.
        count: the steps of each variant.
        draw: random generator for the order.
        load: measures the load by other programs in each variant's turns.
        slices: cut the round into slices, if all variants can be stopped and no energy is
            counted.
        joules: a counter of the energy used; it returns None if none can be read.
        before: called with the name of a variant before its full turn.

    Yields:
        Each variant's turn as it ends, or its failure.
    """
    load.begin()
    going = {name: variants[name] for name in draw.sample(list(variants), len(variants))}
    if slices and in_slices(variants.values(), joules):
        yield from _in_slices(going, count, load)
    else:
        yield from _one_by_one(going, count, load, joules, before)


def in_slices(variants: Collection[VariantProcess], joules: Callable[[], float | None]) -> bool:
    """Returns True if turns are cut into slices; energy per variant can't be counted then."""
    return (
        len(variants) > 1
        and all(variant.worker.can_slice for variant in variants)
        and joules() is None
    )


def _in_slices(
    variants: Mapping[Name, VariantProcess], count: int, load: LoadMeter
) -> Iterator[tuple[Name, Turn | WorkerError]]:
    """All turns of a round, after all replies have arrived."""
    share = SLICE_SECONDS / min((variant.pace for variant in variants.values()), default=1.0)
    seconds = {name: share * variant.pace for name, variant in variants.items()}
    outcomes: dict[Name, Reply | WorkerError] = {}
    pending, begun = list(variants), set[Name]()
    load.lap(None)
    while pending:
        for name in pending:
            try:
                if name not in begun:
                    begun.add(name)
                    variants[name].begin_slices(count)
                reply = variants[name].go_on(seconds[name])
                if reply is not None:
                    outcomes[name] = reply
            except WorkerError as error:
                outcomes[name] = error
            finally:
                load.lap(name)
        pending = [name for name in reversed(pending) if name not in outcomes]
    for name, ended in outcomes.items():
        if isinstance(ended, WorkerError):
            yield name, ended
        else:
            yield name, _turn(ended, load.share(name))


def _one_by_one(
    variants: Mapping[Name, VariantProcess],
    count: int,
    load: LoadMeter,
    joules: Callable[[], float | None],
    before: Callable[[Name], None],
) -> Iterator[tuple[Name, Turn | WorkerError]]:
    for name, variant in variants.items():
        before(name)
        energy = joules()
        load.lap(None)
        try:
            reply = variant.whole_turn(count)
        except WorkerError as error:
            yield name, error
            if isinstance(error, OutOfTimeError):
                return  # nobody else has time either
            continue
        after = joules()
        load.lap(name)
        used = None if energy is None or after is None else after - energy
        yield name, _turn(reply, load.share(name), used)


def _turn(reply: Reply, load: float, joules: float | None = None) -> Turn:
    return Turn(reply["steps"], reply.get("turn_seconds"), load, joules)


def peak_of(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """The largest peak of memory in these steps."""
    peaks = (step.get("peak_memory_bytes") for step in steps)
    return max((peak for peak in peaks if peak is not None), default=None)
