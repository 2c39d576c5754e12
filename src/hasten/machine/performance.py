"""``monitor_performance``: prints the machine's load, line by line, next to any loop."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import TextIO

import psutil

from hasten.errors import require_real
from hasten.machine.gpu import Gpus

SHORTEST_SECONDS = 0.05  # between lines


def monitor_performance(
    interval: float = 1, seconds: float | None = None, file: TextIO | None = None
) -> None:
    """Prints utilisation, memory and temperature per interval, mean ± deviation over GPUs.

    Without a GPU they are the processor's. It ends after ``seconds``, or with Ctrl-C; in a thread
    of your own, with the program (``threading.Thread(target=monitor_performance, daemon=True)``).

    Args:
        interval: seconds from line to line.
        file: where lines go; the standard output if left out.

    Raises:
        ValueError: the interval is too short.
    """
    require_real(interval=interval, seconds=0 if seconds is None else seconds)
    if interval < SHORTEST_SECONDS:
        raise ValueError(f"interval is {interval:g} s; give {SHORTEST_SECONDS:g} s at least")
    gpus = Gpus()
    totals = [one.memory_bytes for one in gpus.descriptions()]
    psutil.cpu_percent()  # the first result covers no time
    ends = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            remaining = interval if ends is None else min(interval, ends - time.monotonic())
            if remaining <= 0:
                return
            time.sleep(remaining)
            print(_gpu_line(gpus, totals) if len(gpus) else _cpu_line(), file=file, flush=True)


def _gpu_line(gpus: Gpus, totals: Sequence[int | None]) -> str:
    readings = gpus.readings()
    used = [
        100 * one.memory_used_bytes / total
        for one, total in zip(readings, totals, strict=True)
        if one.memory_used_bytes is not None and total
    ]
    busy = [100 * one.utilisation for one in readings if one.utilisation is not None]
    warm = [one.temperature for one in readings if one.temperature is not None]
    return (
        f"GPU utilisation: {_spread(busy, '%')} | memory: {_spread(used, '%')} | "
        f"temperature: {_spread(warm, '°C')}"
    )


def _cpu_line() -> str:
    has_sensors = hasattr(psutil, "sensors_temperatures")  # not available on every system
    sensors = psutil.sensors_temperatures() if has_sensors else {}
    warm = [one.current for several in sensors.values() for one in several if one.current]
    return (
        f"CPU utilisation: {psutil.cpu_percent():.1f}% | memory: "
        f"{psutil.virtual_memory().percent:.1f}% | temperature: {_spread(warm, '°C')}"
    )


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "not known"
    mean = f"{statistics.fmean(values):.1f}{unit}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.pstdev(values):.1f}"
