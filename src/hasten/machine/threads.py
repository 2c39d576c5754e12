"""A process's cores, the waiting of its idle threads, and Python's garbage collection.

Threads without a core of their own wait for each other at every operator. So ranks of
one machine get disjoint cores, and complete memory nodes if there are several. Memory
belongs to the node of the core that touches it first. Therefore a rank on the cores of
one node keeps its tensors there. The mask is set on every thread of the process, and
later ones inherit it. OMP_PROC_BIND would pin each thread to one core. It would pin the
main thread too, and with it every process that it starts.

An idle OpenMP thread spins for a moment before it sleeps, because the next operator
often comes at once and a wake-up costs time. The commands of hasten shorten this moment.
A thread can also be set to sleep at once, for processes that share its core, or to keep
spinning.

Python's collector of cyclic garbage walks all live objects whenever enough were made.
Most of them are modules that stay for ever. Here they are excluded (``gc.freeze``), and
the collector runs after a fixed number of updates instead.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from hasten.machine import environment
from hasten.machine.host import numa_nodes
from hasten.machine.memory import is_loaded

WAITING = {  # how idle threads may wait
    "auto": "briefly, then asleep",
    "asleep": "asleep",
    "spinning": "spinning",
}


def waiting(how: str) -> dict[str, str]:
    """Variables for a way of `WAITING` (GNU's libgomp, Intel's libiomp5); none for "auto"."""
    if how == "auto":
        return {}
    asleep = how == "asleep"
    variables = {"OMP_WAIT_POLICY": "PASSIVE" if asleep else "ACTIVE"}
    variables["GOMP_SPINCOUNT"] = "0" if asleep else "INFINITY"  # libgomp prefers it to the policy
    if is_loaded("libiomp5"):  # it spins 200 ms after work unless told otherwise
        variables["KMP_BLOCKTIME"] = "0" if asleep else "200"
    return variables


def waiting_advice() -> str:
    """One line on what to export before Python starts; empty if nothing would change.

    That is so if the user decided, one thread computes, or torch has another OpenMP library.
    """
    decided = any(environment.variable(name) for name in environment.WAITING_VARIABLES)
    if decided or torch.get_num_threads() == 1 or not is_loaded("libgomp"):
        return ""
    ((name, value),) = environment.BRIEF_WAITING.items()
    return f"if other processes use this processor, export {name}={value} before Python starts"


def own_cores(
    cores: Sequence[int], rank: int, ranks: int, nodes: Sequence[frozenset[int]] = ()
) -> tuple[int, ...]:
    """The cores of one of ``ranks`` processes; disjoint, neighbours, within a node if they fit.

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
    """The kernel's list of processors, ``0-3,8``, as numbers."""
    cores: list[int] = []
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on; empty where the system has no such masks."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def keep_to(cores: Sequence[int]) -> None:
    """Let every thread of this process run on these cores alone; later threads inherit it."""
    for path in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(path.name), cores)
        except ProcessLookupError:  # it ended meanwhile
            continue


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Within it this process, and those that it starts, compute with so many threads."""
    before = torch.get_num_threads()
    with environment.with_variables({"OMP_NUM_THREADS": str(count)}):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def use_threads(count: int, interop: int) -> None:
    """So many threads within an operator and between operators.

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
    """The variables this process was started with, later changes not among them (Linux)."""
    try:
        text = Path("/proc/self/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, separator, value in pairs if separator}


class QuietCollector:
    """Looks for garbage after every ``every`` updates of an optimizer and at no other time.

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
        """Follow this optimizer's updates."""
        optimizer.register_step_post_hook(self._after_update)
        weakref.finalize(optimizer, _back_to_normal)

    def _after_update(self, *ignored: Any) -> None:
        if not self.updates:
            gc.collect()
            gc.freeze()  # what lives now lives as long as the run
            gc.disable()
        self.updates += 1
        if self.updates % self.every == 0:
            gc.collect()
            self.collections += 1


def _back_to_normal() -> None:
    gc.enable()
    gc.unfreeze()
