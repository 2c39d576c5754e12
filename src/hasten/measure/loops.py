"""Two training loops of anybody's against each other: interleaved, repeated, compared in pairs.

    result = compare("my_loops:plain", "my_loops:fused")
    print(result)

A job is a **factory**: a function without arguments that builds model, optimizer and data and
returns a step function. The step function does one training step and returns how many tokens (or
items) it did, or a pair (how many, loss). Each job is built in a process of its own, so neither can
change the other; then they take turns in blocks of steps, in an order drawn anew for each round.
Who waits for a turn is stopped, with all its threads and what it has started.

A factory is named, never pickled: ``"module:function"``, ``"script.py:function"``, or a function
that stands at the top level of a module or script (whose file the other process loads under another
name, so what a script does under ``if __name__ == "__main__"`` isn't done there).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.data.file_lock import one_measurement
from hasten.errors import InputError
from hasten.formatting import aligned, span, words
from hasten.measure.statistics import Effect, Interval, paired_ratio, spread, verdict
from hasten.measure.workers import Worker, WorkerError, WorkerPool, WorkerSpec

_LOG = logging.getLogger(__name__)
Job = str | Callable[[], Callable[[], Any]]


class LoopFailedError(RuntimeError):
    """A job's process died, hung, or raised; the message says which, and its last words."""


@dataclass(frozen=True)
class Loop:
    """What was measured of one job: items per second of each round, and the losses of its steps."""

    name: str
    rounds: tuple[float, ...]
    losses: tuple[float, ...] = ()
    peak_memory_bytes: int | None = None
    build_seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two jobs measured side by side; `str` is a table.

    ``ratio`` is the second's items per second over the first's, paired by round, with its 95 %
    interval; ``verdict`` is that of `hasten.measure.statistics.verdict`. Of equal quality it says
    nothing: the losses are shown, not judged.
    """

    first: Loop
    second: Loop
    ratio: Interval
    verdict: Effect
    unit: str = "items"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        loops = {"first": self.first, "second": self.second}
        return {
            **{place: {**loop.__dict__} for place, loop in loops.items()},
            "ratio": self.ratio.summary(),
            "verdict": self.verdict,
            "unit": self.unit,
        }

    def __str__(self) -> str:
        head = ["job", f"{self.unit}/s [95 %]", "ratio [95 %]", "last loss", "peak memory"]
        rows = [head, [*_row(self.first, "1.00×")]]
        rows.append([*_row(self.second, span(self.ratio.summary(), "times"))])
        return f"{aligned(rows)}\nverdict: {self.verdict} ({self.ratio.rounds} rounds)"


def compare(
    job_a: Job,
    job_b: Job,
    *,
    rounds: int = 8,
    steps: int = 4,
    warmup: int = 2,
    seed: int = 0,
    names: tuple[str, str] | None = None,
    unit: str = "items",
    noise_floor: float = 0.01,
    patience_seconds: float = 600.0,
    budget_seconds: float | None = None,
) -> Comparison:
    """Measure the second job against the first.

    Args:
        job_a: the factory of the baseline.
        job_b: the factory of what is to be judged.
        rounds: turns of each.
        steps: of a turn; its value is the median of their items per second.
        warmup: steps before the first round, not measured.
        seed: of the order of turns.
        names: for the table; the functions' names if left out.
        unit: what a step function counts.
        noise_floor: a change that nobody should act on.
        patience_seconds: the longest wait for one turn.
        budget_seconds: all of it, starts included: then there are as many rounds as fit, up to
            ``rounds``.

    Raises:
        InputError: a job can't be found, a number can't be, or two rounds don't fit the budget.
        LoopFailedError: a job's process failed.
    """
    for name, value, least in (("rounds", rounds, 1), ("steps", steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise InputError(f"{name} is {value}; it must be {least} at least")
    if budget_seconds is not None and not budget_seconds > 0:
        raise InputError(f"budget_seconds is {budget_seconds}; it must be more than 0")
    if not 0 <= noise_floor < 1:
        raise InputError(f"noise_floor is {noise_floor}; it is a share from 0 up to 1")
    references = [reference(job) for job in (job_a, job_b)]
    called = names or (_name(references[0]), _name(references[1]))
    found: list[_Turns] = []
    end = math.inf if budget_seconds is None else time.monotonic() + budget_seconds
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_measurement(_LOG.warning, budget_seconds))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(WorkerPool(folder))
        for place, (name, target) in enumerate(zip(called, references, strict=True)):
            worker = pool.start(loop_spec(target), f"loop-{place}")
            found.append(_Turns(name, worker, patience_seconds))
            found[-1].begin(warmup)
        order, longest = random.Random(seed), 0.0
        for done in range(rounds):
            began = time.monotonic()
            lacking = began + max(2 - done, 1) * longest - end
            if lacking > 0 and done >= 2:
                break
            if lacking > 0:  # one round tells nothing of its own error
                raise InputError(
                    f"budget_seconds: {budget_seconds:g} is too short for two rounds of these "
                    f"jobs on this machine; they need {math.ceil(lacking)} s more at least"
                )
            for loop in order.sample(found, 2):
                loop.timeout = min(patience_seconds, max(end - began, 1.0) + longest)
                loop.turn(steps)
            longest = max(longest, time.monotonic() - began)
        first, second = (loop.finish() for loop in found)
    ratio = paired_ratio(first.rounds, second.rounds)
    return Comparison(first, second, ratio, verdict(ratio, noise_floor=noise_floor), unit)


def reference(job: Job) -> str:
    """``module:function`` or ``/path/script.py:function`` of a factory.

    Raises:
        InputError: a function that another process couldn't find by name.
    """
    if isinstance(job, str):
        module, colon, name = job.rpartition(":")
        if not colon or not module or not name.isidentifier():
            raise InputError(f"a job is 'module:function' or 'script.py:function', not {job!r}")
        if module.endswith(".py") and not Path(module).is_file():
            raise InputError(f"{job}: there is no file {module}")
        return f"{Path(module).resolve()}:{name}" if module.endswith(".py") else job
    name = getattr(job, "__qualname__", repr(job))
    if not inspect.isfunction(job) or not name.isidentifier():
        raise InputError(
            f"{name} can't be built in another process: give a function that stands at the top "
            "level of a script or module, or its name as 'module:function'"
        )
    if job.__module__ != "__main__":
        return f"{job.__module__}:{name}"
    file = Path(job.__code__.co_filename)
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"{name} stands in no file: put it into a script, and start that")
    return f"{file.resolve()}:{name}"


def loop_spec(target: str, settings: Mapping[str, Any] | None = None) -> WorkerSpec:
    """The worker of a loop, whose factory is called with these arguments."""
    given = {"target": target, "paths": sys.path, "settings": dict(settings or {})}
    return WorkerSpec("loop", given)


@dataclass
class _Turns:
    """One job's worker, and what its turns have shown."""

    name: str
    worker: Worker
    timeout: float
    rounds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    build_seconds: float | None = None

    def begin(self, warmup: int) -> None:
        """Wait until it is built, and let it warm up."""
        with self._named():
            self.build_seconds = self.worker.ready(self.timeout)["seconds"]
            if warmup:
                self.worker.request("steps", self.timeout, count=warmup)

    def turn(self, count: int) -> None:
        """Its steps of a round."""
        with self._named():
            steps = self.worker.request("steps", self.timeout, count=count)["steps"]
        self.rounds.append(statistics.median(items / seconds for items, seconds, _ in steps))
        self.losses += [loss for *_, loss in steps if loss is not None]

    def finish(self) -> Loop:
        """What was measured; the process ends."""
        with self._named():
            peak = self.worker.request("finish", self.timeout)["peak_memory_bytes"]
        self.worker.close()
        return Loop(self.name, tuple(self.rounds), tuple(self.losses), peak, self.build_seconds)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            raise LoopFailedError(f"{self.name}: {error}") from error


def _name(target: str) -> str:
    return target.rpartition(":")[2]


def _row(loop: Loop, ratio: str) -> list[str]:
    loss = loop.losses[-1] if loop.losses else None
    speed = span(spread(loop.rounds).summary(), "amount")
    return [loop.name, speed, ratio, words(loss, "loss"), words(loop.peak_memory_bytes, "memory")]
