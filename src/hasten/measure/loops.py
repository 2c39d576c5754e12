"""Compares any two training loops: interleaved, repeated, compared in pairs.

    result = compare("my_loops:plain", "my_loops:fused")
    print(result)

A job is a **factory**: a function without arguments that builds model, optimizer and
data and returns a step function. The step function does one training step. It returns
the number of tokens (or items), or a pair (number, loss). Each job is built in a
process of its own, so neither can change the other. Then they take turns in blocks of
steps, in a new random order for each round. A job that waits for its turn is stopped,
with all its threads and child processes.

A factory is given by name, never pickled: ``"module:function"``,
``"script.py:function"``, or a function at the top level of a module or script. The
other process loads that file under another name. Code of a script under
``if __name__ == "__main__"`` therefore doesn't run there.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.formatting import aligned, number_text, span
from hasten.machine.locks import one_measurement
from hasten.measure.ablation import Design
from hasten.measure.budget import rounded_up
from hasten.measure.experiment import ExperimentContext, measure_variants
from hasten.measure.record import ExperimentRecord
from hasten.measure.statistics import Effect, Interval, paired_ratio, spread, verdict
from hasten.measure.workers import WorkerPool, WorkerSpec

PLACES = ("first", "second")
_LOG = logging.getLogger(__name__)
Job = str | Callable[[], Callable[[], Any]]


class LoopFailedError(RuntimeError):
    """A job's process died, hung, or raised; the message has the cause and last output."""


@dataclass(frozen=True)
class Loop:
    """Results of one job: items per second of each round, and the losses of its steps."""

    name: str
    rounds: tuple[float, ...]
    losses: tuple[float, ...] = ()
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Two jobs measured side by side; `str` is a table.

    ``ratio`` is the second's items per second over the first's, paired by round, with its
    95 % interval. ``verdict`` is that of `hasten.measure.statistics.verdict`. It doesn't
    judge equal quality: the losses are only shown.
    """

    first: Loop
    second: Loop
    ratio: Interval
    verdict: Effect
    unit: str = "items"

    def __str__(self) -> str:
        rows = [["job", f"{self.unit}/s [95 %]", "ratio [95 %]", "last loss", "peak memory"]]
        ratios = ("1.00×", span(self.ratio.summary(), "times"))
        for loop, ratio in zip((self.first, self.second), ratios, strict=True):
            speed = span(spread(loop.rounds).summary(), "amount")
            loss = number_text(loop.losses[-1] if loop.losses else None, "loss")
            memory = number_text(loop.peak_memory_bytes, "memory")
            rows.append([loop.name, speed, ratio, loss, memory])
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
    """Compares the speed of the second job with the first.

    Args:
        job_a: the factory of the baseline.
        job_b: the factory of the job to judge.
        rounds: turns of each.
        steps: steps of a turn; its value is that of a middling step
            (`hasten.measure.rounds`).
        warmup: steps before the first round, not measured.
        seed: seed of the order of turns.
        names: names in the table; default: the functions' names.
        unit: the unit that a step function counts.
        noise_floor: a change too small to act on.
        patience_seconds: the longest wait for one turn.
        budget_seconds: time for everything, starts included. There are then as many rounds
            as fit, up to ``rounds``.

    Raises:
        InputError: a job can't be found, a number is invalid, or the budget ends before
            the first round.
        LoopFailedError: a job's process failed.
    """
    if budget_seconds is not None and not budget_seconds > 0:
        raise InputError(f"budget_seconds is {budget_seconds}; it must be more than 0")
    if not 0 <= noise_floor < 1:
        raise InputError(f"noise_floor is {noise_floor}; it is a share from 0 up to 1")
    design = Design(rounds, steps, warmup, evaluations=0, seed=seed, budget_seconds=budget_seconds)
    targets = [loop_reference(job) for job in (job_a, job_b)]
    called = names or [target.rpartition(":")[2] for target in targets]
    began = time.monotonic()
    with (
        one_measurement(_LOG.warning, budget_seconds),
        tempfile.TemporaryDirectory() as folder,
        WorkerPool(Path(folder)) as pool,
    ):
        specs = dict(zip(PLACES, map(loop_spec, targets), strict=True))
        cores = os.cpu_count() or 1
        at = ExperimentContext(pool, specs.__getitem__, 0, cores, patience=patience_seconds)
        record = ExperimentRecord(began=began)

        def check(text: str = "", share: float = 0.0) -> None:
            """Before every start and turn: without one of them there is nothing to compare."""
            for event in record.events:
                if event["event"] == "failed":
                    name = called[PLACES.index(event["variant"])]
                    raise LoopFailedError(f"{name}: {event['why']}")

        plans = dict.fromkeys(PLACES, Plan())
        variants = measure_variants(at, plans, design, check, record=record).variants
        check()
        if not all(variant.rounds for variant in variants) or len(variants) < 2:
            raise InputError(
                f"budget: {rounded_up(budget_seconds or 0.0)} is too short: it was over before the "
                "first round; give several times as much"
            )
    first, second = (
        Loop(
            name,
            tuple(variant.rounds),
            tuple(step["loss"] for step in variant.steps if step["loss"] is not None),
            variant.peak_memory_bytes,
        )
        for name, variant in zip(called, variants, strict=True)
    )
    ratio = paired_ratio(first.rounds, second.rounds)
    return Comparison(first, second, ratio, verdict(ratio, noise_floor=noise_floor), unit)


def loop_reference(job: Job) -> str:
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
            f"{name} can't be built in another process: give a function at the top "
            "level of a script or module, or its name as 'module:function'"
        )
    if job.__module__ != "__main__":
        return f"{job.__module__}:{name}"
    file = Path(job.__code__.co_filename)
    if not file.is_file() or file.suffix != ".py":
        raise InputError(f"{name} is in no file: put it into a script, and start that")
    return f"{file.resolve()}:{name}"


def loop_spec(target: str) -> WorkerSpec:
    """The worker of the loop that a factory makes."""
    arguments = {"target": target, "paths": sys.path}
    return WorkerSpec("loop", arguments, slices=False)  # a loop may wait for what goes on meanwhile
