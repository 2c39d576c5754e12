"""A profile of a run: its ledger, its operators and a trace, from steps that aren't kept.

    1. warm-up steps, which compile, allocate and read ahead
    2. measured steps under the seams' clock alone: times, stability, MFU, data stall
    3. memory by owner, in one pass of its own
    4. one step under torch.profiler: operators and trace; the profiler slows what it watches, so of
       this step only the operators' shares are used
    5. several ranks: the measured records again, on all ranks without communication, then on one
       rank alone while the others sleep

The weights move, in 5 apart on each rank: the session is spent afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from hasten.core.contracts import Dense
from hasten.core.engine import PlainEngine, SendsLate
from hasten.core.layout import OneProcess
from hasten.core.session import Progress, Session
from hasten.core.step import training
from hasten.core.timing import (
    BETWEEN,
    CHECKPOINT,
    DeviceClock,
    HostClock,
    StepMetrics,
    clock_on,
    data_stall,
    split,
)
from hasten.errors import InputError
from hasten.measure.ledger import ledger_of
from hasten.measure.profile_operators import operators, table
from hasten.measure.profile_trace import keep_trace

Tell = Callable[[str, float], None]
CANT_RUN_ALONE = "not measured: with this layout no rank can run its passes alone"


def steps_needed(warmup: int, steps: int) -> int:
    """Steps that the job has to allow: those of the warm-up, the measured, the profiled one."""
    return warmup + steps + 1


def measure(
    session: Session,
    warmup: int,
    steps: int,
    folder: Path,
    tell: Tell = lambda text, share: None,
) -> dict[str, Any]:
    """Profile a fresh session; the measured part of ``profile.json``. All ranks call it together.

    The first rank writes its trace into ``folder``.

    Raises:
        InputError: the job ends before all steps are done.
    """
    clock = session.setup.clock = clock_on(session.setup.job.device)
    run: Any = training(session)
    tell(f"{warmup} steps to warm up", 0.0)
    _take(run, warmup)
    before = replace(session.progress)
    tell(f"measuring {steps} steps", 0.2)
    measured = _take(run, steps)
    known = clock.laps if isinstance(clock, HostClock | DeviceClock) else []
    laps = [lap for lap in known if lap[0] not in (BETWEEN, CHECKPOINT)]
    counted = list(clock.steps)[-steps:]
    tell("counting memory", 0.5)
    ledger = ledger_of(session, warmup)
    tell("profiling one step", 0.6)
    profiled = _profiled(session, run, folder)
    run.close()  # a feed that reads ahead ends with it
    ranks = _gather(
        {
            "rank": session.setup.facts.world.rank,
            "seconds": sum(m.step_seconds for m in measured),
            "data_stall_share": data_stall(counted),
            "step": split(counted, session.saves),
            "wire": wire_of(measured),
        }
    )
    return {
        **_figures(measured),
        "data_stall_share": data_stall(counted),
        "ledger": ledger,
        "laps": laps,
        "operators": profiled,
        "ranks": ranks,
        "parallel": _parallel(session, before, measured, ranks, tell),
    }


def _take(run: Any, count: int) -> list[StepMetrics]:
    found = list(islice(run, count))
    if len(found) < count:
        raise InputError(
            f"the data ends {count - len(found)} steps too early for a profile; give fewer "
            "--steps, or more records"
        )
    return found


def _figures(measured: Sequence[StepMetrics]) -> dict[str, Any]:
    seconds = sum(m.step_seconds for m in measured)
    known = [m.mfu for m in measured if m.mfu is not None]
    return {
        "measured_steps": len(measured),
        "step_seconds": statistics.median(m.step_seconds for m in measured),
        "tokens_per_second": sum(m.tokens for m in measured) / seconds,
        "padding_share": 1 - sum(m.tokens for m in measured) / sum(m.slots for m in measured),
        "mfu": statistics.median(known) if known else None,
        "peak_memory_bytes": max(m.peak_memory_bytes for m in measured),
    }


def wire_of(measured: Sequence[StepMetrics]) -> dict[str, float] | None:
    """Means over the steps of what this rank's wire took; None where the layout can't tell."""
    known = [m for m in measured if m.exposed_communication_seconds is not None]
    if not known:
        return None
    names = ("wire_seconds", "exposed_communication_seconds", "hidden_communication_seconds")
    found: dict[str, float] = {}
    for name in (*names, "wire_bytes"):
        values = [getattr(m, name) for m in known]
        if all(value is not None for value in values):
            found[name] = statistics.fmean(values)
    return found


def _profiled(session: Session, run: Any, folder: Path) -> dict[str, Any]:
    """One step under torch's profiler, on every rank alike; the first rank keeps the trace."""
    device = session.setup.job.device
    on_gpu = device.startswith("cuda")
    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    began = time.perf_counter()
    with torch.profiler.profile(activities=wanted) as profiler:
        _take(run, 1)
        if on_gpu:
            torch.accelerator.synchronize(
                device
            )  # outside all measured steps: its last kernels belong to it
        seconds = time.perf_counter() - began
    rows = operators(profiler.key_averages(), on_gpu)
    found = {"profiled_step_seconds": seconds, **table(rows, seconds)}
    if session.setup.facts.world.is_main:
        found["trace"] = keep_trace(profiler.export_chrome_trace, folder)
    return found


def _parallel(
    session: Session,
    before: Progress,
    measured: Sequence[StepMetrics],
    ranks: Sequence[dict[str, Any]],
    tell: Tell,
) -> dict[str, Any] | None:
    """Efficiency of several ranks against both denominators, over the measured records."""
    layout, engine, setup = session.setup.layout, session.engine, session.setup
    if layout.size == 1:
        return None
    if not isinstance(layout, SendsLate) or not isinstance(engine, PlainEngine):
        return {"ranks": layout.size, "text": CANT_RUN_ALONE}
    engine.module = layout.alone(session.module)
    setup.layout, setup.wire = OneProcess(), Dense()
    tell("the same records without communication", 0.7)
    dist.barrier()
    apart = _gather(_again(session, before, len(measured)))
    tell("one rank alone", 0.85)
    alone = _again(session, before, len(measured)) if setup.facts.world.is_main else None
    dist.barrier()  # the others sleep in it
    alone = _gather(alone)[0]
    return efficiency(
        tokens=sum(m.tokens for m in measured),
        seconds=max(rank["seconds"] for rank in ranks),
        apart=apart,
        alone=alone,
        steps=len(measured),
    )


def efficiency(
    tokens: int,
    seconds: float,
    apart: Sequence[tuple[int, float]],
    alone: tuple[int, float],
    steps: int,
) -> dict[str, Any]:
    """Two answers to "how much of the ranks' speed arrives", from (tokens, seconds) of each way.

    Against one rank: its tokens per second with the machine to itself x the number of ranks, so
    cores and memory that ranks share count as a loss. Against no communication: all ranks at once,
    the slowest rank's time, so uneven ranks count in both and only exchange is the difference.
    """
    ranks, slowest = len(apart), max(spent for _, spent in apart)
    one = alone[0] / alone[1]
    return {
        "ranks": ranks,
        "tokens_per_second": tokens / seconds,
        "one_rank_tokens_per_second": one,
        "efficiency_against_one_rank": tokens / seconds / (ranks * one),
        "without_communication_tokens_per_second": tokens / slowest,
        "efficiency_against_no_communication": slowest / seconds,
        "communication_seconds": max(seconds - slowest, 0.0) / steps,
    }


def _again(session: Session, before: Progress, steps: int) -> tuple[int, float]:
    """(tokens, seconds) of this rank's own passes over the same records once more."""
    session.progress = replace(before)
    run: Any = training(session)
    found = _take(run, steps)
    run.close()
    return sum(m.tokens for m in found), sum(m.step_seconds for m in found)


def _gather(mine: Any) -> list[Any]:
    """What every rank has, in the order of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
