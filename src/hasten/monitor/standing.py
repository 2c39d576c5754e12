"""Where a run stands: one flat object that page, terminal, Prometheus and alerts all read."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import psutil

from hasten.formatting import number
from hasten.monitor.events import short

if TYPE_CHECKING:
    from hasten.monitor.run import Run

RECENT = 200  # steps that rates and bands are of
SILENT_SECONDS = 60.0  # without a new step before that is said
SILENT_STEPS = 20.0  # or so many median steps, whichever is longer
HUNG_SECONDS = 10.0  # without an answer of the folder before that is said
FINISHED = ("done", "early stop", "interrupted", "left")


def standing(run: Run, now: float) -> dict[str, Any]:
    """The run's numbers; None where they aren't known."""
    last, summary, start = run.last, run.summary, run.start
    rates = [r for line in run.recent if (r := number(line.get("tokens_per_second"))) is not None]
    seconds = [s for line in run.recent if (s := number(line.get("step_seconds"))) is not None]
    middle = statistics.median(seconds) if seconds else None
    sign = run.last_sign
    status, words = _status(run, now, sign, middle)
    step, total = number(last.get("step")), number(start.get("total_steps"))
    finished = status in FINISHED
    goes_on = status in ("running", "silent", "reading")
    left = max(total - step, 0) if total and step is not None and goes_on else None
    mean = _mean(seconds)
    return {
        "status": status,
        "words": words,
        "step": step,
        "total_steps": total,
        "tokens": number(summary.get("tokens")) if finished else run.tokens,
        "seconds": run.seconds,
        "eta_seconds": left * mean if left is not None and mean else None,
        "last_sign": sign,
        "loss": number(last.get("loss")),
        "held_out_loss": run.held_out,
        "tokens_per_second": number(last.get("tokens_per_second")),
        "tokens_per_second_median": statistics.median(rates) if rates else None,
        "tokens_per_second_low": _quantile(rates, 0.1),
        "tokens_per_second_high": _quantile(rates, 0.9),
        "step_seconds_median": middle,
        "step_spread": _spread(seconds),
        "mfu": _mean_of(run.recent, "mfu"),
        "peak_memory_bytes": number(last.get("peak_memory_bytes")),
        "padding_share": _mean_of(run.recent, "padding_share"),
        "data_stall_share": _mean_of(run.recent, "data_stall_share"),
        "exposed_communication_share": _communication(run),
        "wire_bytes": _mean_of(run.recent, "wire_bytes"),
        "expert_load_ratio": number(last.get("expert_load_ratio")),
        "grad_norm": number(last.get("grad_norm")),
        "learning_rate": number(last.get("learning_rate")),
        "skipped_steps": run.skipped,
        "world_size": number(start.get("world_size")) or number(summary.get("world_size")),
        **_machine(run.machine_last),
        **_cost(run, finished),
        **_slowest(run.ranks),
        "unreadable_lines": run.unreadable,
        "hardware": short(start.get("hardware") or ""),
    }


def _status(run: Run, now: float, sign: float | None, middle: float | None) -> tuple[str, str]:
    if run.trouble:
        return "unreadable", run.trouble
    if now - run.answered > HUNG_SECONDS:
        since = duration(now - run.answered)
        return (
            "unreadable",
            f"the folder hasn't answered for {since}; what was seen before is shown",
        )
    if run.share_read < 1 and not run.torn:
        return "reading", f"reading the run's files, {run.share_read:.0%}"
    if run.summary:
        found = run.summary.get("stopped")
        return (found, found) if found in FINISHED else ("done", "done")
    if _is_gone(run.start):
        torn = "; its last line is cut off" if run.torn else ""
        return "ended", f"its process is gone and left no summary.json{torn}"
    if sign is None:
        return "starting", "no step yet"
    age = now - sign
    if age > max(SILENT_SECONDS, SILENT_STEPS * (middle or 0.0)):
        torn = "; its last line is cut off" if run.torn else ""
        return "silent", f"no step for {duration(age)}{torn}"
    return "running", "running"


def _is_gone(start: Mapping[str, Any]) -> bool:
    """Whether the run's process was on this machine and is no more."""
    pid, began = start.get("pid"), number(start.get("began"))
    if not isinstance(pid, int) or began is None or start.get("host") != platform.node():
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # over, and nobody has asked how it ended
            return True
        return bool(process.create_time() > began + 1)  # its number was given again
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def _machine(line: Mapping[str, Any]) -> dict[str, float | None]:
    names = ("device_utilisation", "device_temperature", "device_power_watts")
    more = ("device_memory_bytes", "host_utilisation", "host_memory_bytes", "disk_free_bytes")
    return {name: number(line.get(name)) for name in (*names, *more)}


def _cost(run: Run, finished: bool) -> dict[str, Any]:
    """What the steps have cost so far; of a finished run, what its summary says."""
    told = run.summary.get("cost")
    if finished and isinstance(told, dict):
        return {"cost": number(told.get("total")), "currency": short(told.get("currency") or "")}
    hour = number(run.start.get("price_per_hour"))
    cost = None if hour is None else hour * run.seconds / 3600
    return {"cost": cost, "currency": short(run.start.get("currency") or "")}


def _slowest(ranks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The rank whose own work (data, copy, forward: before it waits for others) takes longest."""
    own = {rank: s for rank, line in ranks.items() if (s := number(line.get("own_seconds")))}
    if len(own) < 2:
        return {"slowest_rank": None, "slowest_rank_ratio": None}
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median(s for rank, s in own.items() if rank != slowest)
    return {"slowest_rank": slowest, "slowest_rank_ratio": own[slowest] / others}


def _communication(run: Run) -> float | None:
    """Of recent steps; else of a finished run as a whole, where its summary can tell it."""
    recent = _mean_of(run.recent, "exposed_communication_share")
    parts = run.summary.get("step_parts")
    if recent is not None:
        return recent
    if not isinstance(parts, dict):
        return None
    found, whole = number(parts.get("communication")), sum(number(v) or 0 for v in parts.values())
    return found / whole if found is not None and whole else None


def _mean_of(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return _mean([v for line in lines if (v := number(line.get(name))) is not None])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _spread(values: list[float]) -> float | None:
    """Median absolute deviation / median."""
    middle = statistics.median(values) if values else 0.0
    return statistics.median(abs(v - middle) for v in values) / middle if middle else None


def duration(seconds: float) -> str:
    """``42 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
