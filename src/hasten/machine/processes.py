"""Processes: processor time, memory, load of other processes, heartbeats, idle threads.

An experiment may share its machine with other processes. The background load during a
variant's turn is the busy time of the cores, minus the processor time of this process
and its descendants.

An idle OpenMP thread spins for a moment before it sleeps. The next operator often comes
at once, and a wake-up costs time. The commands of hasten shorten this moment, and more so
while other processes use the processor (`IdleThreads`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hasten.errors import InputError, StoppedError
from hasten.machine import environment
from hasten.machine.files import write_atomic

PR_SET_PDEATHSIG = 1  # man 2 prctl


def end_with_parent() -> None:
    """Requests that the kernel ends this process when its parent ends (Linux).

    A stopped process (SIGSTOP) can't notice a closed pipe, and would stay for ever. SIGKILL
    ends it all the same (prctl(2)).
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_stopped: memoryview[float] | None = None


def count_stops(file: Path) -> None:
    """Makes `running_time` subtract the seconds in the file's first double.

    A program that stops this process (SIGSTOP) adds the length of each stop to that number,
    before this process continues.
    """
    global _stopped
    with file.open("r+b") as opened:
        _stopped = memoryview(mmap.mmap(opened.fileno(), 8)).cast("d")


def running_time() -> float:
    """Returns the seconds of a clock that pauses while this process is stopped (`count_stops`)."""
    return time.perf_counter() - (0.0 if _stopped is None else _stopped[0])


def busy_seconds() -> float:
    """Returns the seconds that the usable cores were busy since the machine started.

    Time that a hypervisor gave to other guests (steal) counts as busy. Waiting for a disk counts
    as idle. The field ``user`` already includes the time of guests (man 5 proc, /proc/stat).
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    total = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if usable is None or core in usable:
            by_kind = times._asdict()
            total += sum(by_kind.get(name, 0.0) for name in ("user", "nice", "system"))
            total += sum(by_kind.get(name, 0.0) for name in ("irq", "softirq", "steal"))
    return total


def tree() -> list[psutil.Process]:
    """Returns this process and all its running descendants."""
    this_process = psutil.Process()
    return [this_process, *this_process.children(recursive=True)]


def tree_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the processor seconds of these processes and of their ended children.

    This is cheap. `tree`, which finds the processes, reads all of the machine's (milliseconds).
    """
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # an ended process is in its parent's sum
            total += sum(process.cpu_times()[:4])  # user and system, of it and of ended children
    return total


def loaded_library(name: str) -> str:
    """Returns the path of a loaded library with ``name`` in its file name; "" if there is none."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # not on this system
        lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if name in line)
    return next((path for path in paths if name in Path(path).name), "")


def available_bytes(limit_bytes: int) -> int:
    """Returns the memory that is available without swapping, at most ``limit_bytes``."""
    return min(int(psutil.virtual_memory().available), limit_bytes)


def resident_bytes() -> int:
    """Returns the bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def host_memory_peak() -> int:
    """Returns the largest resident bytes of this process since its start or the last reset."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# Load of other processes: their share of the machine's processor time during a variant's turn.
#
# Linux counts processor time in ticks of 10 ms, so the load of a short time can't be measured.
# Below `SHORTEST_SECONDS` it counts as 0. So do small negative differences, which ticks at the
# boundary cause.

SHORTEST_SECONDS = 0.2  # 20 ticks; the load of a shorter time counts as 0
TREE_SECONDS = 5.0  # age from which a meter reads its list of processes again


@dataclass(frozen=True)
class Instant:
    """Wall clock and processor times at one moment, in seconds."""

    wall: float
    busy: float  # seconds of all usable cores
    ours: float  # seconds of this process and its descendants


def read_clocks(processes: Sequence[psutil.Process]) -> Instant:
    """Reads the clocks, ``ours`` for these processes."""
    return Instant(time.monotonic(), busy_seconds(), tree_seconds(processes))


class LoadMeter:
    """Measures the background load during each of several jobs that take turns in short slices.

    The list of hasten's own processes is read again after ``TREE_SECONDS`` only, because
    finding them reads all processes of the machine.

    Args:
        cores: number of cores that the jobs share.
    """

    def __init__(self, cores: int) -> None:
        self._cores, self._tree_read_at = cores, -math.inf
        self.begin()

    def begin(self) -> None:
        """Begins a new round: clears the earlier times."""
        if time.monotonic() - self._tree_read_at > TREE_SECONDS:
            self._tree, self._tree_read_at = tree(), time.monotonic()
        self._spans: dict[Hashable, tuple[float, float]] = {}
        self._last = read_clocks(self._tree)

    def lap(self, name: Hashable) -> None:
        """Counts the time since the last lap for the job ``name``; None: for no measured job."""
        now = read_clocks(self._tree)
        span, foreign = self._spans.get(name, (0.0, 0.0))
        last, self._last = self._last, now
        foreign_seconds = (now.busy - last.busy) - (now.ours - last.ours)
        self._spans[name] = span + now.wall - last.wall, foreign + foreign_seconds

    def share(self, name: Hashable) -> float:
        """Returns the background load during a job: a share (0 to 1) of the cores' capacity."""
        span, foreign = self._spans.get(name, (0.0, 0.0))
        if span < SHORTEST_SECONDS:
            return 0.0
        return min(max(foreign / (span * self._cores), 0.0), 1.0)


# Files of a supervised rank: heartbeat, exit reason and log.
#
# - rank-R.heartbeat: written in place after each step: count, step, True if more steps follow
# - rank-R.words: reason of the rank's end: exit code, time, one line, and the traceback
# - rank-R.log: output of the rank (the first rank prints directly)
#
# ``HASTEN_ATTEMPT_FOLDER`` names their folder; each start of the ranks has another one. A rank that
# hangs is still a running process, so the supervisor checks that the heartbeat changes.

FOLDER, ATTEMPT = "HASTEN_ATTEMPT_FOLDER", "HASTEN_ATTEMPT"
_UNSET = "hasten sets it for the ranks that it starts, so unset it"
BEAT = struct.Struct("<qqq")


@dataclass(frozen=True)
class HeartbeatState:
    """Content of a heartbeat: count, step, and True after the last step."""

    count: int = 0
    step: int = 0
    over: int = 0

    @property
    def trains(self) -> bool:
        """Returns True if another step follows."""
        return bool(self.count) and not self.over


class Heartbeat:
    """Writes a rank's heartbeat; without a supervisor it writes nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._count = 0
        self._handle: int | None = None
        if folder is not None:
            self._handle = os.open(heartbeat_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def beat(self, step: int, over: bool = False) -> None:
        """Counts a step; ``over``: no step follows, and the remaining work may take long."""
        if self._handle is not None:
            self._count += 1
            os.pwrite(self._handle, BEAT.pack(self._count, step, over), 0)


def heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.heartbeat"


def ended_by(code: int) -> str:
    """Returns a phrase with the signal that ended a process, from its negative exit code."""
    names = {int(s): s.name for s in signal.Signals}
    name = names.get(-code, f"signal {-code}")
    why = ", as the kernel does where memory runs out" if code == -signal.SIGKILL else ""
    return f"it was ended by {name}{why}"


def words_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.words"


def read_heartbeat(folder: Path, rank: int) -> HeartbeatState:
    """Returns the content of the rank's heartbeat file."""
    try:
        content = heartbeat_file(folder, rank).read_bytes()
    except OSError:
        return HeartbeatState()
    return HeartbeatState(*BEAT.unpack(content)) if len(content) == BEAT.size else HeartbeatState()


def read_exit_reason(folder: Path, rank: int) -> dict[str, Any] | None:
    """Returns a rank's exit reason, or None."""
    with contextlib.suppress(OSError, ValueError):
        record: dict[str, Any] = json.loads(words_file(folder, rank).read_text())
        return record
    return None


def attempt_folder() -> Path | None:
    """Returns the folder for files that the supervisor reads; None without a supervisor."""
    folder = environment.variable(FOLDER)
    if folder and not os.path.isdir(folder):
        raise InputError(f"{FOLDER} is {folder!r}, which is no folder; {_UNSET}")
    return Path(folder) if folder else None


def attempt_number() -> int:
    """Returns how many times the supervisor has started this run, at least 1."""
    return environment.positive_number(ATTEMPT, _UNSET) or 1


def write_exit_reason(error: BaseException) -> bool:
    """Writes why this rank ends, unless it is written already; False without a supervisor."""
    try:
        folder, rank = attempt_folder(), environment.world().rank
    except InputError:  # a variable is wrong, which may be the reported error
        return False
    if folder is None:
        return False
    lines = str(error).strip().splitlines() or [""]
    advice = isinstance(error, InputError | StoppedError)
    code = 2 if isinstance(error, InputError) else getattr(error, "code", 1)
    report = {
        "time": time.time(),
        "code": code if isinstance(code, int) and advice else 1,
        "line": " ".join(lines) if advice else f"{type(error).__name__}: {lines[0]}",
        "traceback": "" if advice else "".join(traceback.format_exception(error)),
    }
    path = words_file(folder, rank)
    if not path.exists():
        with contextlib.suppress(OSError):  # the disk may be the cause
            write_atomic(path, json.dumps(report), durable=False)
    return True


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Context that writes an error as this rank's exit reason, before it waits for other ranks."""
    try:
        yield
    except Exception as error:
        write_exit_reason(error)
        raise


def exit_with_parent() -> None:
    """Requests that this rank ends with its supervisor (Linux alone)."""
    parent = environment.positive_number(environment.PARENT, _UNSET)
    if parent is None or not sys.platform.startswith("linux"):
        return
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


class IdleThreads:
    """Makes idle OpenMP threads of this process sleep sooner than by default.

    With GNU's library, an idle thread polls 300,000 times before it sleeps. If the process
    has more OpenMP threads than cores, it polls 100 times (GOMP_SPINCOUNT in the manual).
    So an extra team of threads, which computes nothing, makes all others sleep sooner. The
    team ends with the thread that started it. No result depends on it.
    """

    def __init__(self) -> None:
        self._end: threading.Event | None = None  # ends the extra team

    @property
    def sleep_sooner(self) -> bool:
        """Returns True while the extra team exists."""
        return self._end is not None

    @sleep_sooner.setter
    def sleep_sooner(self, wanted: bool) -> None:
        """Starts or ends the team; no effect without GNU's library, or if the user set a value."""
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
    return {name: content for name, separator, content in pairs if separator}
