"""A process's cores, the waiting of its idle threads, and Python's garbage collection.

Threads without a core of their own wait for each other at every operator. So ranks of
one machine get disjoint cores, and complete memory nodes if there are several. Memory
belongs to the node of the core that touches it first. Therefore a rank on the cores of
one node keeps its tensors there. The mask is set on every thread of the process, and
later ones inherit it. OMP_PROC_BIND would pin each thread to one core. It would pin the
main thread too, and with it every process that it starts.

An idle OpenMP thread spins for a moment before it sleeps, because the next operator
often comes at once and a wake-up costs time. The commands of hasten shorten this moment,
and while other processes use the processor it is shorter still (`IdleThreads`). A thread
can also be set to sleep at once, for processes that share its core, or to keep spinning.

Python's collector of cyclic garbage walks all live objects whenever enough were made.
Most of them are modules that stay for ever. Here they are excluded (``gc.freeze``), and
the collector runs after a fixed number of updates instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from hasten.machine import environment
from hasten.machine.host import numa_nodes
from hasten.machine.processes import loaded_library

WAITING = {  # ways in which idle threads wait
    "auto": "briefly, then asleep",
    "asleep": "asleep",
    "spinning": "spinning",
}


def waiting(how: str) -> dict[str, str]:
    """Returns the variables of a `WAITING` entry (GNU's libgomp, Intel's libiomp5)."""
    if how == "auto":
        return {}
    asleep = how == "asleep"
    variables = {"OMP_WAIT_POLICY": "PASSIVE" if asleep else "ACTIVE"}
    variables["GOMP_SPINCOUNT"] = "0" if asleep else "INFINITY"  # libgomp prefers it to the policy
    if loaded_library("libiomp5"):  # it spins 200 ms after work by default
        variables["KMP_BLOCKTIME"] = "0" if asleep else "200"
    return variables


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


def own_cores(
    cores: Sequence[int], rank: int, ranks: int, nodes: Sequence[frozenset[int]] = ()
) -> tuple[int, ...]:
    """Returns the cores of one of ``ranks`` processes; neighbours, within a node if they fit.

    With fewer cores than ranks, ranks share one.

    Raises:
        ValueError: no cores, or a rank that isn't there.
    """
    if not cores or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} can't have a share of {len(cores)} cores")
    usable = [sorted(set(cores) & node) for node in nodes if set(cores) & node]
    if len(usable) > 1 and ranks % len(usable) == 0:
        per_node = ranks // len(usable)
        return own_cores(usable[rank // per_node], rank % per_node, per_node)
    ordered = sorted(cores)
    if len(ordered) < ranks:
        return (ordered[rank % len(ordered)],)
    start, end = rank * len(ordered) // ranks, (rank + 1) * len(ordered) // ranks
    return tuple(ordered[start:end])


def memory_nodes(root: Path = Path("/")) -> list[frozenset[int]]:
    """Returns the cores of each memory node that has any; empty if it isn't reported."""
    return [frozenset(cores) for node in numa_nodes(root) if (cores := cpu_list(node.cpus))]


def cpu_list(text: str) -> list[int]:
    """Returns the numbers of the kernel's list of processors, ``0-3,8``."""
    cores: list[int] = []
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use; empty if the system has no masks."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def keep_to(cores: Sequence[int]) -> None:
    """Restricts every thread of this process to these cores; later threads inherit it."""
    for path in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(path.name), cores)
        except ProcessLookupError:  # the thread has ended
            continue


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Sets the number of threads of this process, and of those that it starts, inside."""
    before = torch.get_num_threads()
    with environment.with_variables({"OMP_NUM_THREADS": str(count)}):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def use_threads(count: int, interop: int) -> None:
    """Sets the threads within an operator and between operators.

    The second number can't change any more once torch has begun to use it; it then stays.
    """
    torch.set_num_threads(count)
    if torch.get_num_interop_threads() != interop:
        try:
            torch.set_num_interop_threads(interop)
        except RuntimeError as error:
            if not re.search("cannot set number of interop threads", str(error)):
                raise


def started_with() -> dict[str, str]:
    """Returns the variables at the start of this process, without later changes (Linux)."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, separator, value in pairs if separator}


class QuietCollector:
    """Collects garbage after every ``every`` updates of an optimizer and at no other time.

    From the first update on; when the optimizer is gone Python collects by itself again.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(
                f"every is {every}; collect after a whole number of updates, from 1 on"
            )
        self.every = every
        self.updates = 0
        self.collections = 0

    def attach(self, optimizer: Optimizer) -> None:
        """Follows this optimizer's updates."""
        optimizer.register_step_post_hook(self._after_update)
        weakref.finalize(optimizer, _back_to_normal)

    def _after_update(self, *ignored: Any) -> None:
        if not self.updates:
            gc.collect()
            gc.freeze()  # present objects live as long as the run
            gc.disable()
        self.updates += 1
        if self.updates % self.every == 0:
            gc.collect()
            self.collections += 1


def _back_to_normal() -> None:
    gc.enable()
    gc.unfreeze()
