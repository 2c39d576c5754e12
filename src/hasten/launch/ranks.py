"""One process per rank on this machine: start them, let them meet, end them together.

Ranks that hasten starts meet through a file in the run's folder and talk over the loopback
interface; no port is opened to the network. Under torchrun, Slurm or another launcher the usual
environment variables are there already, and the ranks meet where those say
(:mod:`hasten.launch.joining`).
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hasten.core.loop import HASTE
from hasten.launch.joining import backend_for, join
from hasten.machine import environment as environment_
from hasten.machine.environment import World
from hasten.machine.processes import PARENT, ended_by

GRACE_SECONDS = 10.0  # for the others to end by themselves once a rank has failed or rank 0 is done
TIMEOUT = datetime.timedelta(minutes=10)
ADVICE = 2  # exit code of what the user has to mend (docs/metrics.md)


@contextlib.contextmanager
def process_group(
    world: World, device: str, timeout: datetime.timedelta = TIMEOUT, backend: str = "auto"
) -> Iterator[None]:
    """The default process group for as long as the context lasts; nothing for a single rank.

    ``timeout`` bounds how long a rank waits for the others in an exchange, and to meet them.
    Build what uses the group in a function called inside, so that it is gone when the group goes.

    Raises:
        InputError: the ranks can't meet, or the backend can't reach the device's memory.
    """
    import torch.distributed as dist

    if world.size == 1 or dist.is_initialized():
        yield
        return
    join(world, backend_for(device, backend, environment_.ranks_here(world)), timeout, device)
    try:
        yield
    finally:
        # Whoever drops the last reference to a gloo group joins its threads. If that is DDP's
        # reducer it holds the interpreter's lock, which a thread may want for freeing a tensor, and
        # both wait for ever (torch 2.13). So what was built inside goes first; callers build it in
        # a function of its own.
        gc.collect()
        dist.destroy_process_group()


def again(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become ``python -m hasten ARGUMENTS`` with these variables; it doesn't begin again itself.

    The process keeps its number, its terminal and its signals (execve(2)).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    environment = environment_.child_environment({**variables, environment_.STARTED_FOR_PLAN: "1"})
    os.execve(sys.executable, [sys.executable, "-m", "hasten", *arguments], environment)


def start(
    arguments: Sequence[str],
    count: int,
    folder: Path,
    cores: int,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> int:
    """Run ``python -m hasten ARGUMENTS`` as ``count`` ranks and wait; the exit code.

    Rank 0 speaks to the user; what the others say is kept beside the run. When one fails, the
    others are ended and its last words are shown. Cores are shared out between the ranks.
    ``environ`` gives the variables that a rank's plan wants before it starts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ranks-") as place:
        logs = [Path(place) / f"rank-{rank}.log" for rank in range(count)]
        processes = [
            _start_rank(
                arguments,
                rank,
                {
                    **rank_environment(rank, count, Path(place), max(1, cores // count)),
                    **environ(rank),
                    PARENT: str(os.getpid()),  # a rank doesn't outlive this process
                    environment_.STARTED_FOR_PLAN: "1",
                },
                logs[rank],
            )
            for rank in range(count)
        ]
        with _forwarding(processes):
            failed = _wait(processes)
        if failed is None:
            return 0
        code = processes[failed].returncode
        if code < 0:
            print(f"rank {failed} failed: {ended_by(code)}", file=sys.stderr)
        elif failed:
            words = logs[failed].read_text(errors="replace").strip().splitlines()
            if words or code != ADVICE:  # rank 0 has said what holds for all
                print(f"rank {failed} failed: {words[-1] if words else ''}", file=sys.stderr)
        return code if code > 0 else 1


def rank_environment(rank: int, count: int, place: Path, threads: int) -> dict[str, str]:
    """This process's environment with a rank's place in it; ranks meet in the folder ``place``."""
    return environment_.child_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            # Absolute: in file://a/b torch takes a for the name of a host, and waits for it.
            "HASTEN_RENDEZVOUS": str(place.absolute() / "rendezvous"),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": str(threads),
        }
    )


def places(count: int, cores: int, folder: Path) -> list[dict[str, str]]:
    """What tells each of some ranks its place, which may be stopped between two exchanges.

    They meet in the folder, which has to be new, and share the cores. A single rank needs nothing.
    """
    if count == 1:
        return [{}]
    # NCCL's monitor would take ranks that are stopped for ranks that hang.
    stopped = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    threads = max(1, cores // count)
    return [rank_environment(rank, count, folder, threads) | stopped for rank in range(count)]


def _start_rank(
    arguments: Sequence[str], rank: int, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hasten", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that failed, or None; when it returns, all have ended.

    Rank 0 saves and reports, so that when it has ended well nothing is lost by ending a rank that
    doesn't find its way out.
    """
    failed: int | None = None
    deadline = float("inf")
    while any(p.poll() is None for p in processes):
        for rank, process in enumerate(processes):
            if failed is None and process.poll() not in (None, 0):
                failed, deadline = rank, time.monotonic() + GRACE_SECONDS
                _signal(processes, signal.SIGTERM)
        if processes[0].poll() == 0:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            _signal(processes, signal.SIGKILL)
            break
        time.sleep(0.05)
    codes = [p.wait() for p in processes]
    done = codes[0] == 0
    bad = [r for r, code in enumerate(codes) if code and not (done and code == -signal.SIGKILL)]
    return failed if failed is not None else next(iter(bad), None)


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


@contextlib.contextmanager
def _forwarding(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """A terminal sends Ctrl-C to the ranks itself; SIGTERM reaches this process alone."""

    def forward(number: int, frame: object) -> None:
        _signal(processes, signal.SIGTERM)

    before = [
        (signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN)),
        *((n, signal.signal(n, forward)) for n in HASTE),
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        _signal(processes, signal.SIGKILL)
