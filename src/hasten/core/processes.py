"""What processes use of this machine: processor time on the usable cores, and memory that is left.

An experiment shares its machine with strangers. What they took while an arm had its turn is what
the cores were busy with, less what this process and all that it started have used.
"""

from __future__ import annotations

import contextlib
import os

import psutil


def busy_seconds() -> float:
    """Seconds the usable cores were busy since the machine started, whoever used them.

    Time that a hypervisor gave to other guests (steal) was lost to us like any other's use. Waiting
    for a disk is idle time; a guest's time is in user's already (man 5 proc, /proc/stat).
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    total = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if usable is None or core in usable:
            known = times._asdict()
            total += sum(known.get(name, 0.0) for name in ("user", "nice", "system"))
            total += sum(known.get(name, 0.0) for name in ("irq", "softirq", "steal"))
    return total


def tree_seconds() -> float:
    """Processor seconds of this process and of all that it started, ended ones included."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # one that ended just now is in its parent's sum
            total += sum(process.cpu_times()[:4])  # user, system, and both of waited-for children
    return total


def available_bytes(limit_bytes: int) -> int:
    """Memory that can be had now without swapping, at most ``limit_bytes``."""
    return min(int(psutil.virtual_memory().available), limit_bytes)
