"""The cores of a process, the number of its threads, and the waiting of its idle ones.

An idle OpenMP thread spins for a moment before it sleeps, because the next operator
often comes at once and a wake-up costs time. The commands of hasten shorten this moment,
and while other processes use the processor it is shorter still (`IdleThreads`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from pathlib import Path

import torch

from hasten.machine import environment
from hasten.machine.processes import loaded_library


class IdleThreads:
    """Idle threads of this process, which can sleep sooner than OpenMP's default.

    With GNU's library, an idle thread looks for work 300,000 times before it sleeps. If the
    process has more OpenMP threads than cores, it looks 100 times (GOMP_SPINCOUNT in its manual).
    Therefore one more team of threads makes all others sleep sooner. It computes nothing, and
    ends with the thread that started it. No result depends on it.
    """

    def __init__(self) -> None:
        self._end: threading.Event | None = None  # ends the extra team

    @property
    def sleep_sooner(self) -> bool:
        """Returns True while the extra team exists."""
        return self._end is not None

    @sleep_sooner.setter
    def sleep_sooner(self, wanted: bool) -> None:
        """Starts or ends the team; no effect with another library, one thread or a user's value."""
        if wanted == self.sleep_sooner:
            return
        if self._end is not None:
            self._end.set()
            self._end = None
            return
        library, threads = loaded_library("libgomp"), torch.get_num_threads()
        brief = environment.BRIEF_WAITING.items()
        decided = {n: v for n in environment.WAITING_VARIABLES if (v := environment.variable(n))}
        if not library or threads == 1 or not decided.items() <= brief:
            return
        self._end = threading.Event()
        weakref.finalize(self, self._end.set)
        size = max(len(usable_cores()) - threads, 0) + 2
        stay = threading.Thread(target=_keep_team, args=(library, size, self._end), daemon=True)
        stay.start()


def _keep_team(library: str, size: int, end: threading.Event) -> None:
    yielding = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
    ctypes.CDLL(library).GOMP_parallel(yielding, None, ctypes.c_uint(size), ctypes.c_uint(0))
    end.wait()


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use; empty if the system has no masks."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def started_with() -> dict[str, str]:
    """Returns the variables at the start of this process, without later changes (Linux)."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, separator, value in pairs if separator}
