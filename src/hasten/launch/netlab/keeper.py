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
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hasten.launch.netlab import naming, system
from hasten.launch.netlab.network import NIC, Network, Nothing, Tuns, Veths, address
from hasten.launch.netlab.processes import PORT, Job, Rank, rank_environment

LOOK_SECONDS = 0.2  # how often the guard looks for its keeper and the owner


class Keeper:
    """A lab's network and jobs; each public method answers one request."""

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder, self.spec = folder, spec
        self.network = _network(spec)
        self.network.limit(spec["bits"])
        self.network.shape(spec["delay"], spec["loss"])
        self.jobs: list[Job] = []
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
                Rank(self.network.namespace(rank // ranks), {**inherited, **own, **env}, log)
            )
        self.jobs.append(Job(command, started, cwd, limit, grace))
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
            return {"error": system.words(error)}


def _network(spec: Mapping[str, Any]) -> Network:
    if spec["mode"] == "loopback":
        return Nothing()
    return (Tuns if spec["switch"] else Veths)(spec["hosts"], spec["mtu"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def keep(folder: Path, spec: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Be the keeper: build, say so, and answer until ended."""
    system.die_with_parent()
    if spec["mode"] != "loopback":
        system.unshare(system.NEW_MOUNTS)  # here, so that the guard still sees the owner in /proc
        system.mount_own_proc()
    try:
        keeper = Keeper(folder, spec)
    except Exception as error:  # whatever it is, who waits for the lab has to hear of it
        tell({"error": system.words(error)})
        return

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            with contextlib.suppress(BrokenPipeError):  # who asked has gone
                self.wfile.write(json.dumps(keeper.answer(line)).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(folder / "socket"), Handler) as server:
        tell({"ready": True})
        server.serve_forever()


def guard(folder: Path, spec: Mapping[str, Any]) -> None:
    """Be the guard: leave for new namespaces, start the keeper, and clean up after it."""

    def tell(words: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(words).encode() + b"\n")

    naming.write_manifest(folder, spec)
    try:
        _leave(spec["mode"])
    except OSError as error:
        tell({"error": system.words(error)})
        naming.clear(folder)
        return
    system.inherit_orphans()
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
    naming.clear(folder)


def _leave(mode: str) -> None:
    namespaces = system.NEW_NET | system.NEW_PIDS
    if mode == "user":
        user, group = os.geteuid(), os.getegid()
        system.unshare(system.NEW_USER | namespaces)
        system.become_root_of_own_users(user, group)
    elif mode == "root":
        system.unshare(namespaces)


def _there(owner: Mapping[str, Any]) -> bool:
    """Whether the owner lives; its pipe can outlive it in a process that it forked."""
    return owner["born"] is None or naming.born(owner["process"]) == owner["born"]


def _end_orphans() -> None:
    """Without a namespace of process numbers, what the ranks had started falls to the guard."""
    for _ in range(100):
        left = system.children(os.getpid())
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
