"""Ranks of one command on a lab's hosts: started together, ended together, never left alone.

When a rank fails, the others have some seconds to say what they noticed, since that is what a test
of a broken link looks at; then they are asked to end, and then they are ended. A rank's own
children go with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.launch.netlab import system

SECONDS_TO_LEAVE = 5.0  # between being asked to end and being ended
PORT = 29500  # torch's usual one; each host has its own ports


@dataclass(frozen=True)
class Rank:
    """One process to be: its host's network namespace, variables and the file of what it says."""

    namespace: int | None
    environment: Mapping[str, str]
    log: Path


def rank_environment(
    rank: int, hosts: int, ranks: int, place: Path, nic: str, master: tuple[str, int], cores: int
) -> dict[str, str]:
    """What torch.distributed, gloo and hasten look at; the ranks of a host follow each other.

    They meet in a file, or at ``master``. Cores are shared out among all ranks.
    """
    world, threads = hosts * ranks, max(1, cores // (hosts * ranks))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(rank // ranks),
        "NODE_RANK": str(rank // ranks),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "HASTEN_RENDEZVOUS": str(place / "rendezvous"),
        "HASTEN_NETLAB_RANKS_PER_HOST": str(ranks),
        "GLOO_SOCKET_IFNAME": nic,
        "TP_SOCKET_IFNAME": nic,
        "NCCL_SOCKET_IFNAME": nic,
        "OMP_NUM_THREADS": str(threads),
    }


class Job:
    """A command on all ranks, watched by a thread of its own until every process has ended."""

    def __init__(
        self, command: Sequence[str], ranks: Sequence[Rank], cwd: str, limit: float, grace: float
    ) -> None:
        self.codes: list[int | None] = [None] * len(ranks)
        self.first: int | None = None  # the first rank that failed
        self.reason = ""  # why the job was ended, if it did not end by itself
        self.done = threading.Event()
        self._ask = threading.Event()
        work = (list(command), ranks, cwd, limit, grace)
        self._thread = threading.Thread(target=self._watch, args=work, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have all ranks ended."""
        self._ask.set()

    def _watch(
        self, command: list[str], ranks: Sequence[Rank], cwd: str, limit: float, grace: float
    ) -> None:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in ranks:
                processes.append(_start(command, rank, cwd))
            self._wait(processes, time.monotonic() + limit, limit, grace)
        except OSError as error:
            self.reason = f"{command[0]} can't be started: {error}"
        finally:
            _signal(processes, signal.SIGKILL)
            codes = [p.wait() for p in processes]
            self.codes = [*codes, *[None] * (len(ranks) - len(codes))]
            self.done.set()

    def _wait(
        self, processes: list[subprocess.Popen[bytes]], end: float, limit: float, grace: float
    ) -> None:
        while any(p.poll() is None for p in processes):
            if self.first is None:
                failed = [r for r, p in enumerate(processes) if p.poll() not in (None, 0)]
                if failed:
                    self.first = failed[0]
                    end = min(end, time.monotonic() + grace)
            if self._ask.is_set() or time.monotonic() > end:
                if self._ask.is_set():
                    self.reason = "ended on request"
                elif self.first is None:
                    self.reason = f"not done within {limit:g} s"
                else:
                    self.reason = f"ended {grace:g} s after rank {self.first} failed"
                _leave(processes)
                return
            time.sleep(0.02)
        if self.first is None:
            self.first = next((r for r, p in enumerate(processes) if p.returncode), None)


def _leave(processes: list[subprocess.Popen[bytes]]) -> None:
    _signal(processes, signal.SIGTERM)
    end = time.monotonic() + SECONDS_TO_LEAVE
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        time.sleep(0.02)


def _start(command: list[str], rank: Rank, cwd: str) -> subprocess.Popen[bytes]:
    alone = rank.namespace is None
    place = contextlib.nullcontext() if rank.namespace is None else system.inside(rank.namespace)
    # Without a namespace of process numbers, the keeper's end has to be passed on.
    first: Callable[[], None] | None = system.die_with_parent if alone else None
    with place, rank.log.open("wb") as log:
        return subprocess.Popen(
            command,
            env=dict(rank.environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=first,
        )


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Each rank leads a group of its own, with the processes it started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
