"""One command on all ranks of a lab: started together, ended together, none left alone.

If a rank fails, the others have some seconds to report what they noticed, which is what a test of
a broken link checks. Then they are asked to end, and then they are killed, with their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from netlab.network import die_with_parent, inside

SECONDS_TO_LEAVE = 5.0  # between being asked to end and being ended
PORT = 29500  # torch's usual one; each host has its own ports
COUNTS = "HASTEN_NETLAB_COUNTS"  # variable: where ranks without interfaces note what they sent


@dataclass(frozen=True)
class LabRank:
    """A process to start: its host's network namespace, its variables, the file of its output."""

    namespace: int | None
    environment: Mapping[str, str]
    log: Path


class LabJob:
    """A command on all ranks, watched by a thread of its own until every process has ended."""

    def __init__(
        self, command: Sequence[str], ranks: Sequence[LabRank], cwd: str, limit: float, grace: float
    ) -> None:
        self.codes: list[int | None] = [None] * len(ranks)
        self.first: int | None = None  # the first rank that failed
        self.reason = ""  # why the job was ended, if it did not end by itself
        self.done = threading.Event()
        self.asked_to_end = threading.Event()
        work = (list(command), ranks, cwd, limit, grace)
        threading.Thread(target=self._watch, args=work, daemon=True).start()

    def _watch(
        self, command: list[str], ranks: Sequence[LabRank], cwd: str, limit: float, grace: float
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
            if self.asked_to_end.is_set() or time.monotonic() > end:
                if self.asked_to_end.is_set():
                    self.reason = "ended on request"
                elif self.first is None:
                    self.reason = f"not done within {limit:g} s"
                else:
                    self.reason = f"ended {grace:g} s after rank {self.first} failed"
                _signal(processes, signal.SIGTERM)
                end = time.monotonic() + SECONDS_TO_LEAVE
                while any(p.poll() is None for p in processes) and time.monotonic() < end:
                    time.sleep(0.02)
                return
            time.sleep(0.02)
        if self.first is None:
            self.first = next((r for r, p in enumerate(processes) if p.returncode), None)


def _start(command: list[str], rank: LabRank, cwd: str) -> subprocess.Popen[bytes]:
    alone = rank.namespace is None
    namespace = contextlib.nullcontext() if rank.namespace is None else inside(rank.namespace)
    with namespace, rank.log.open("wb") as log:
        return subprocess.Popen(
            command,
            env=dict(rank.environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Without a namespace of process numbers, the keeper's end has to be passed on.
            preexec_fn=die_with_parent if alone else None,
        )


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Each rank leads a group of its own, with the processes it started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
