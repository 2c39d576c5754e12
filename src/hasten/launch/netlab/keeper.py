"""The process that is a lab: it holds the namespaces, starts the ranks, answers requests.

    Lab (or hasten netlab) -> guard -> keeper -> ranks, switch

The **guard** leaves for new namespaces and waits. The **keeper** is the first process in a
namespace of process numbers, so that when it ends the kernel ends everything inside (see
pid_namespaces(7)) and the network namespaces, which have no other owner, go too. The keeper dies
with the guard; the guard ends the keeper when the lab's owner closes its pipe or is gone, and
removes the lab's folder. So any of them can be killed and nothing stays but, at worst, a folder.

Requests come through a socket in the lab's folder: one line of JSON each, one line back.
Nothing here imports torch. Run as ``python -m hasten.launch.netlab.keeper FOLDER``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.launch.netlab import network, registry
from hasten.launch.netlab.network import (
    NIC,
    LoopbackNetwork,
    Network,
    UserSpaceSwitch,
    VethBridge,
    address,
)

# Ranks of one command on a lab's hosts: started together, ended together, never left alone.
#
# When a rank fails, the others have some seconds to say what they noticed, since that is what a
# test of a broken link looks at; then they are asked to end, and then they are ended. A rank's own
# children go with it.

SECONDS_TO_LEAVE = 5.0  # between being asked to end and being ended
PORT = 29500  # torch's usual one; each host has its own ports


@dataclass(frozen=True)
class LabRank:
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


class LabJob:
    """A command on all ranks, watched by a thread of its own until every process has ended."""

    def __init__(
        self, command: Sequence[str], ranks: Sequence[LabRank], cwd: str, limit: float, grace: float
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


def _start(command: list[str], rank: LabRank, cwd: str) -> subprocess.Popen[bytes]:
    alone = rank.namespace is None
    place = contextlib.nullcontext() if rank.namespace is None else network.inside(rank.namespace)
    # Without a namespace of process numbers, the keeper's end has to be passed on.
    first: Callable[[], None] | None = network.die_with_parent if alone else None
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


# The keeper, and the guard that ends it.

LOOK_SECONDS = 0.2  # how often the guard looks for its keeper and the owner


class Keeper:
    """A lab's network and jobs; each public method answers one request."""

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder, self.spec = folder, spec
        self.network = _network(spec)
        self.network.limit(spec["bits"])
        self.network.shape(spec["delay"], spec["loss"])
        self.jobs: list[LabJob] = []
        self.apart = spec["mode"] != "loopback"

    def start(
        self,
        command: list[str],
        inherited: dict[str, str],
        env: dict[str, str],
        cwd: str,
        limit: float,
        grace: float,
    ) -> dict[str, Any]:
        """Start a command on every rank; a lab's own variables win over inherited ones."""
        hosts, ranks = self.spec["hosts"], self.spec["ranks"]
        place = self.folder / f"job-{len(self.jobs)}"
        counts = place / "counts"
        counts.mkdir(parents=True)
        if not self.apart:
            inherited = {**inherited, "HASTEN_NETLAB_COUNTS": str(counts)}
        nic = NIC if self.apart else "lo0" if sys.platform == "darwin" else "lo"
        master = (address(0), PORT) if self.apart else ("127.0.0.1", _free_port())
        started = []
        for rank in range(hosts * ranks):
            own = rank_environment(rank, hosts, ranks, place, nic, master, self.spec["cores"])
            log = place / f"rank-{rank}.log"
            started.append(
                LabRank(self.network.namespace(rank // ranks), {**inherited, **own, **env}, log)
            )
        self.jobs.append(LabJob(command, started, cwd, limit, grace))
        return {"job": len(self.jobs) - 1, "place": str(place)}

    def poll(self, job: int, seconds: float) -> dict[str, Any]:
        """Wait a while for a job and say how it stands."""
        found = self.jobs[job]
        done = found.done.wait(min(seconds, 5.0))
        return {"done": done, "codes": found.codes, "first": found.first, "reason": found.reason}

    def end(self, job: int) -> dict[str, Any]:
        """End a job's ranks."""
        self.jobs[job].end()
        return {}

    def counted(self, host: int) -> dict[str, Any]:
        """Bytes that a host sent and received so far."""
        if self.apart:
            sent, received = self.network.counted(host)
            return {"sent": sent, "received": received}
        ranks = self.spec["ranks"]
        sent = received = 0
        for path in self.folder.glob("job-*/counts/*.json"):
            noted = json.loads(path.read_text())
            home = noted["rank"] // ranks
            for rank, size in noted["to"].items():
                if int(rank) // ranks != home:
                    sent += round(size) * (home == host)
                    received += round(size) * (int(rank) // ranks == host)
        return {"sent": sent, "received": received}

    def limit(self, bits: float) -> dict[str, Any]:
        """Change the rate of all links."""
        self.network.limit(bits)
        return {}

    def shape(self, delay: float, loss: float) -> dict[str, Any]:
        """Change delay and loss of all links."""
        self.network.shape(delay, loss)
        return {}

    def cut(self, host: int, cut: bool) -> dict[str, Any]:
        """Cut a host's link, or heal it."""
        self.network.cut(host, cut)
        return {}

    def answer(self, line: bytes) -> dict[str, Any]:
        """One request; what went wrong is part of the answer."""
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            f.__name__: f
            for f in (
                *(self.start, self.poll, self.end, self.counted),
                *(self.limit, self.shape, self.cut),
            )
        }
        try:
            asked = json.loads(line)
            return verbs[asked.pop("verb")](**asked)
        except (OSError, KeyError, IndexError, ValueError, TypeError) as error:
            return {"error": network.words(error)}


def _network(spec: Mapping[str, Any]) -> Network:
    if spec["mode"] == "loopback":
        return LoopbackNetwork()
    return (UserSpaceSwitch if spec["switch"] else VethBridge)(spec["hosts"], spec["mtu"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep(folder: Path, spec: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Be the keeper: build, say so, and answer until ended."""
    network.die_with_parent()
    if spec["mode"] != "loopback":
        network.unshare(network.NEW_MOUNTS)  # here, so that the guard still sees the owner in /proc
        network.mount_own_proc()
    try:
        keeper = Keeper(folder, spec)
    except Exception as error:  # whatever it is, who waits for the lab has to hear of it
        tell({"error": network.words(error)})
        return

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            with contextlib.suppress(BrokenPipeError):  # who asked has gone
                self.wfile.write(json.dumps(keeper.answer(line)).encode() + b"\n")

    class LabServer(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with LabServer(str(folder / "socket"), Handler) as server:
        tell({"ready": True})
        server.serve_forever()


def guard(folder: Path, spec: Mapping[str, Any]) -> None:
    """Be the guard: leave for new namespaces, start the keeper, and clean up after it."""

    def tell(words: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(words).encode() + b"\n")

    registry.write_manifest(folder, spec)
    try:
        _leave_lab(spec["mode"])
    except OSError as error:
        tell({"error": network.words(error)})
        registry.clear(folder)
        return
    network.inherit_orphans()
    child = os.fork()
    if child == 0:
        try:
            keep(folder, spec, tell)
        finally:
            os._exit(0)

    def end(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = spec["owner"]
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if owner is None:
            time.sleep(LOOK_SECONDS)
        elif select.select([0], [], [], LOOK_SECONDS)[0] or not _there(owner):
            end(0, None)
            os.waitpid(child, 0)
            break
    _end_orphans()
    registry.clear(folder)


def _leave_lab(mode: str) -> None:
    namespaces = network.NEW_NET | network.NEW_PIDS
    if mode == "user":
        user, group = os.geteuid(), os.getegid()
        network.unshare(network.NEW_USER | namespaces)
        network.become_root_of_own_users(user, group)
    elif mode == "root":
        network.unshare(namespaces)


def _there(owner: Mapping[str, Any]) -> bool:
    """Whether the owner lives; its pipe can outlive it in a process that it forked."""
    return owner["born"] is None or registry.born(owner["process"]) == owner["born"]


def _end_orphans() -> None:
    """Without a namespace of process numbers, what the ranks had started falls to the guard."""
    for _ in range(100):
        left = network.children(os.getpid())
        if not left:
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    guard(place, json.loads((place / "spec.json").read_text()))
