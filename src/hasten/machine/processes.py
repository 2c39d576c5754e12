"""What processes use of this machine: processor time on the usable cores, and memory that is left.

An experiment shares its machine with strangers. What they took while an arm had its turn is what
the cores were busy with, less what this process and all that it started have used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

import psutil

PR_SET_PDEATHSIG = 1  # man 2 prctl


def end_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it ends, however (Linux).

    A stopped process reads no pipe and would stay for ever.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system: nothing is to be asked
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
