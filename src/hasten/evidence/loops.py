"""Two training loops of anybody's against each other: interleaved, repeated, compared in pairs.

    result = compare("my_loops:plain", "my_loops:fused")
    print(result)

A job is a **factory**: a function without arguments that builds model, optimizer and data and
returns a step function. The step function does one training step and returns how many tokens (or
items) it did, or a pair (how many, loss). Each job is built in a process of its own, so neither can
change the other; then they take turns in blocks of steps, in an order drawn anew for each round.

A factory is named, never pickled: ``"module:function"``, ``"script.py:function"``, or a function
that stands at the top level of a module or script (whose file the other process loads under another
name, so what a script does under ``if __name__ == "__main__"`` isn't done there).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from hasten.core import facts
from hasten.errors import InputError
from hasten.evidence.report_words import span, words
from hasten.evidence.statistics import Interval, Verdict, paired_ratio, spread, verdict

Job = str | Callable[[], Callable[[], Any]]
ENTRY = "hasten.evidence.loop_process"


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
    interval; ``verdict`` is that of `hasten.evidence.statistics.verdict`. Of equal quality it says
    nothing: the losses are shown, not judged.
    """

    first: Loop
    second: Loop
    ratio: Interval
    verdict: Verdict
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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
        text = "\n".join(line.rstrip() for line in lines)
        return f"{text}\nverdict: {self.verdict} ({self.ratio.rounds} rounds)"


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

    Raises:
        InputError: a job can't be found, or a number can't be.
        LoopFailedError: a job's process failed.
    """
    for name, value, least in (("rounds", rounds, 1), ("steps", steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise InputError(f"{name} is {value}; it must be {least} at least")
    references = [reference(job) for job in (job_a, job_b)]
    called = names or (_name(references[0]), _name(references[1]))
    with contextlib.ExitStack() as stack:
        found: list[LoopProcess] = []
        for place, (name, target) in enumerate(zip(called, references, strict=True)):
            log = stack.enter_context(tempfile.TemporaryFile())
            loop = LoopProcess(name, target, log, patience_seconds)
            stack.enter_context(loop)
            loop.begin(warmup)
            found.insert(place, loop)
        order = random.Random(seed)
        for _ in range(rounds):
            for loop in order.sample(found, 2):
                loop.turn(steps)
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


@dataclass
class LoopProcess:
    """One job's process, asleep between its turns."""

    name: str
    target: str
    log: IO[bytes]
    patience: float
    settings: Mapping[str, Any] = field(default_factory=dict)  # the factory's arguments
    rounds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    build_seconds: float | None = None

    def __enter__(self) -> LoopProcess:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        asked = json.dumps(dict(self.settings))
        arguments = [self.target, json.dumps(sys.path), str(orders), str(answers), asked]
        self._process = subprocess.Popen(
            [sys.executable, "-m", ENTRY, *arguments],
            pass_fds=(orders, answers),
            env=facts.child_environment({"OMP_WAIT_POLICY": "PASSIVE"}),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        os.close(orders)
        os.close(answers)
        self._unread = b""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._orders)
        os.close(self._answers)
        try:
            self._process.wait(timeout=0.1 if kind else 5)  # the end of orders lets it leave
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begin(self, warmup: int) -> None:
        self.build_seconds = self._answer()["seconds"]
        if warmup:
            self._ask({"do": "steps", "count": warmup})

    def steps(self, count: int) -> list[tuple[float, float, float | None]]:
        """So many steps: items, seconds, loss of each."""
        return [(i, s, loss) for i, s, loss in self._ask({"do": "steps", "count": count})["steps"]]

    def turn(self, count: int) -> None:
        steps = self.steps(count)
        self.rounds.append(statistics.median(items / seconds for items, seconds, _ in steps))
        self.losses += [loss for *_, loss in steps if loss is not None]

    def finish(self) -> Loop:
        peak = self._ask({"do": "finish"})["peak_memory_bytes"]
        return Loop(self.name, tuple(self.rounds), tuple(self.losses), peak, self.build_seconds)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            os.write(self._orders, (json.dumps(order) + "\n").encode())
        except OSError as error:
            raise LoopFailedError(self._last_words()) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.patience
        while b"\n" not in self._unread:
            rest = max(deadline - time.monotonic(), 0)
            if not select.select([self._answers], [], [], rest)[0]:
                raise LoopFailedError(f"{self.name}: no answer within {self.patience:.0f} s")
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise LoopFailedError(self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise LoopFailedError(f"{self.name}: {found['failed']}")
        return found

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self.log.seek(0)
        said = self.log.read().decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        return f"{self.name}: the process ended with code {self._process.returncode}: {why}"


def _name(target: str) -> str:
    return target.rpartition(":")[2]


def _row(loop: Loop, ratio: str) -> list[str]:
    loss = loop.losses[-1] if loop.losses else None
    speed = span(spread(loop.rounds).summary(), "amount")
    return [loop.name, speed, ratio, words(loss, "loss"), words(loop.peak_memory_bytes, "memory")]
