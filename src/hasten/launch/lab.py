"""Hosts as network namespaces on this machine, with rate-limited links and commands.

    with Lab(hosts=2, rate="100mbit") as lab:
        results = lab.run(["bash", "job.sh"])
        sent, received = lab.bytes(0)

A lab is three kinds of process: Lab -> watchdog -> keeper -> ranks. Commands run on
the hosts' ranks.

The **watchdog** moves into new namespaces and waits. The **keeper** is the first
process in a namespace of process numbers. When it ends, the kernel ends everything
inside (pid_namespaces(7)). The network namespaces end too, because they have no other
owner. The keeper dies with the watchdog. The watchdog ends the keeper when the
lab's owner closes its pipe or is gone, and removes the lab's folder. So any of them can
be killed, and at worst a folder remains.

Requests come through a socket in the lab's folder: one line of JSON each, one line
back. The machine's own network namespace is never entered, so it can't be changed.
Nothing here imports torch. The watchdog runs as
``python -m hasten.launch.lab FOLDER``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import selectors
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from hasten.errors import InputError
from hasten.launch.lab_job import PORT, LabJob, LabRank
from hasten.launch.lab_network import (
    NEW_MOUNTS,
    NEW_NET,
    NEW_PIDS,
    NEW_USER,
    NIC,
    LoopbackNetwork,
    Network,
    VethBridge,
    address,
    adopt_orphans,
    become_root_of_own_users,
    bits_per_second,
    die_with_parent,
    error_text,
    mount_own_proc,
    unshare,
)
from hasten.machine import environment

# The folder of a lab: its socket and its logs.
#
# Namespaces of a lab have no name anywhere: they live as long as the lab's keeper, a process. So
# all that a lab can leave behind is its folder, whose name is random.

SECONDS_TO_END = 10.0


def room() -> Path:
    """The folder of this user's labs, closed to others."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"hasten-netlab-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != user:
        raise InputError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder


def born(process: int) -> int | None:
    """When a process started, in clock ticks since boot, or None if there is none (proc(5))."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a command's name may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


# The keeper, and the watchdog that ends it.

LOOK_SECONDS = 0.2  # how often the watchdog looks for its keeper and the owner


class Keeper:
    """A lab's network and jobs; each method that ``VERBS`` names answers one request."""

    VERBS: ClassVar[tuple[str, ...]] = ("start", "poll", "end", "counted")
    network: Network

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder, self.spec = folder, spec
        self.jobs: list[LabJob] = []
        self.apart = spec["mode"] != "loopback"
        self.connect()

    def connect(self) -> None:
        """Make the hosts and their links."""
        made = VethBridge(self.spec["hosts"], self.spec["mtu"]) if self.apart else LoopbackNetwork()
        self.network = made
        self.network.limit(self.spec["bits"])

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
        job_folder = self.folder / f"job-{len(self.jobs)}"
        job_folder.mkdir()
        if self.apart:
            master = address(0), PORT
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                master = "127.0.0.1", int(probe.getsockname()[1])
        ranks = self.spec["ranks"]
        started = []
        for rank in range(self.spec["hosts"] * ranks):
            namespace = self.network.namespace(rank // ranks)
            lab_variables = self.rank_environment(rank, job_folder, master)
            log = job_folder / f"rank-{rank}.log"
            started.append(LabRank(namespace, {**inherited, **lab_variables, **env}, log))
        self.jobs.append(LabJob(command, started, cwd, limit, grace))
        return {"job": len(self.jobs) - 1, "place": str(job_folder)}

    def rank_environment(self, rank: int, folder: Path, master: tuple[str, int]) -> dict[str, str]:
        """Returns a rank's variables for torch.distributed, gloo and hasten.

        The ranks of a host have consecutive numbers. They meet in a file, or at ``master``.
        Cores are shared among all ranks.
        """
        ranks = self.spec["ranks"]
        world = self.spec["hosts"] * ranks
        nic = NIC if self.apart else "lo0" if sys.platform == "darwin" else "lo"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % ranks),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(rank // ranks),
            "NODE_RANK": str(rank // ranks),
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "HASTEN_RENDEZVOUS": str(folder / "rendezvous"),
            "GLOO_SOCKET_IFNAME": nic,
            "TP_SOCKET_IFNAME": nic,
            "NCCL_SOCKET_IFNAME": nic,
            "OMP_NUM_THREADS": str(max(1, self.spec["cores"] // world)),
        }

    def poll(self, job: int, seconds: float) -> dict[str, Any]:
        """Waits a while for a job and returns its state."""
        lab_job = self.jobs[job]
        done = lab_job.done.wait(min(seconds, 5.0))
        return {
            "done": done,
            "codes": lab_job.codes,
            "first": lab_job.first,
            "reason": lab_job.reason,
        }

    def end(self, job: int) -> dict[str, Any]:
        """End a job's ranks."""
        self.jobs[job].asked_to_end.set()
        return {}

    def counted(self, host: int) -> dict[str, Any]:
        """Bytes that a host sent and received so far."""
        sent, received = self.network.counted(host)
        return {"sent": sent, "received": received}

    def answer(self, line: bytes) -> dict[str, Any]:
        """One request; what went wrong is part of the answer."""
        try:
            request = json.loads(line)
            verb = request.pop("verb")
            if verb not in self.VERBS:
                raise KeyError(verb)
            answer: dict[str, Any] = getattr(self, verb)(**request)
        except (OSError, KeyError, IndexError, ValueError, TypeError) as error:
            return {"error": error_text(error)}
        return answer


def _keep(
    folder: Path,
    spec: Mapping[str, Any],
    tell: Callable[[dict[str, Any]], None],
    kind: type[Keeper],
) -> None:
    """Runs the keeper: builds the hosts, reports that, and answers until it is ended."""
    die_with_parent()
    if spec["mode"] != "loopback":
        unshare(NEW_MOUNTS)  # here, so that the watchdog still sees the owner in /proc
        mount_own_proc()
    try:
        keeper = kind(folder, spec)
    except Exception as error:  # whatever it is, the process that waits for the lab has to know
        tell({"error": error_text(error)})
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


def watchdog(folder: Path, kind: type[Keeper] = Keeper) -> None:  # noqa: C901  # in order
    """Be the watchdog: leave for new namespaces, start the keeper, and clean up after it."""
    spec = json.loads((folder / "spec.json").read_text())

    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(message).encode() + b"\n")

    try:
        user, group = os.geteuid(), os.getegid()
        if spec["mode"] == "user":
            unshare(NEW_USER | NEW_NET | NEW_PIDS)
            become_root_of_own_users(user, group)
        elif spec["mode"] == "root":
            unshare(NEW_NET | NEW_PIDS)
    except OSError as error:
        tell({"error": error_text(error)})
        shutil.rmtree(folder, ignore_errors=True)
        return
    adopt_orphans()
    child = os.fork()
    if child == 0:
        try:
            _keep(folder, spec, tell, kind)
        finally:
            os._exit(0)

    def end(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    def is_alive(owner: Mapping[str, Any]) -> bool:
        """Returns True if the owner lives: a process that it forked may hold its pipe."""
        return owner["born"] is None or born(owner["process"]) == owner["born"]

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = spec["owner"]
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if select.select([0], [], [], LOOK_SECONDS)[0] or not is_alive(owner):
            end(0, None)
            os.waitpid(child, 0)
            break
    # Without a namespace of process numbers, what the ranks had started falls to this process.
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    for _ in range(100):
        child_ids = children.read_text().split() if children.exists() else []
        if not child_ids:
            break
        for orphan in map(int, child_ids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)
    shutil.rmtree(folder, ignore_errors=True)


# A lab as its user sees it.

Mode = Literal["auto", "user", "root", "loopback"]
MODES: tuple[Mode, ...] = ("user", "root", "loopback")
START_SECONDS = 60.0  # the first switch in user space is compiled, and the machine may be busy
MOST_RANKS = 64


@dataclass(frozen=True)
class Result:
    """How a rank ended: its exit code (negative: the signal; None: never started), its output.

    ``reason`` is empty unless the lab ended it.
    """

    rank: int
    host: int
    code: int | None
    output: str
    reason: str = ""


class Lab:
    """Hosts with ranks on this machine, from ``start`` (or ``with``) to ``close``.

    ``rate`` limits each host's link in each direction. The values of ``mode``
    are a user's own namespaces, root's, or plain processes on the loopback interface. Plain
    processes have no links. With ``auto`` it is the first mode that works and, if links
    were requested, has them.
    """

    # how Python runs its watchdog
    KEEPER: ClassVar[Sequence[str]] = ("-m", "hasten.launch.lab")

    def __init__(
        self,
        hosts: int = 2,
        ranks: int = 1,
        rate: str | float | None = None,
        mode: Mode = "auto",
    ) -> None:
        if hosts < 1 or ranks < 1 or hosts * ranks > MOST_RANKS:
            raise InputError(
                f"{hosts} hosts with {ranks} ranks each: at least 1 of both and at most "
                f"{MOST_RANKS} ranks in all"
            )
        if mode not in ("auto", *MODES):
            raise InputError(f"mode={mode!r}: it is one of auto, {', '.join(MODES)}")
        self.hosts, self.ranks, self.asked = hosts, ranks, mode
        self.mode: Mode = mode
        self.name = ""
        self._folder = Path()
        self._watchdog: subprocess.Popen[bytes] | None = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._spec: dict[str, Any] = {
            "hosts": hosts,
            "ranks": ranks,
            "mtu": 1500,
            "bits": bits_per_second(rate),
            "cores": cores or 1,
        }

    def start(self) -> Self:
        """Build it."""
        links = self._spec["bits"] or self._spec.get("switch")
        tried = []
        for mode in MODES if self.asked == "auto" else (self.asked,):
            if mode == "loopback" and links:
                tried.append("loopback: plain processes have no links to limit or delay")
                continue
            complaint = self.attempt(mode)
            if not complaint:
                return self
            tried.append(f"{mode}: {complaint}")
        raise InputError(f"no lab works here ({'; '.join(tried)}): see tools/netlab/README.md")

    def attempt(self, mode: Mode) -> str:
        """Build it in one mode; the complaint if it can't be."""
        if mode != "loopback" and sys.platform != "linux":
            return "network namespaces are Linux's"
        folder = room() / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
        process = os.getpid()
        owner = {"process": process, "born": born(process)}
        (folder / "spec.json").write_text(json.dumps({**self._spec, "mode": mode, "owner": owner}))
        with (folder / "keeper.log").open("wb") as log:
            watchdog = subprocess.Popen(
                [sys.executable, *self.KEEPER, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        answer = _first_line(watchdog)
        if not answer.get("ready"):
            log_text = ""
            with contextlib.suppress(FileNotFoundError):  # its keeper removes the folder at its end
                log_text = (folder / "keeper.log").read_text()
            watchdog.terminate()
            watchdog.wait()
            shutil.rmtree(folder, ignore_errors=True)
            last = (log_text.strip().splitlines() or ["its keeper ended without a word"])[-1]
            return str(answer.get("error", last))
        self.mode, self._watchdog = mode, watchdog
        self.name, self._folder = folder.name, folder
        return ""

    def __enter__(self) -> Self:
        return self if self.name else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in it and remove it."""
        if self._watchdog is None:
            return
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._watchdog = None

    def started(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        seconds: float,
        grace: float,
        cwd: Path | None,
    ) -> tuple[int, Path]:
        """The number and the folder of a command that now runs on every rank."""
        reply = self.ask(
            "start",
            command=list(command),
            inherited=environment.child_environment({}),
            env=dict(env or {}),
            cwd=str(cwd or Path.cwd()),
            limit=seconds,
            grace=grace,
        )
        return reply["job"], Path(reply["place"])

    def results(self, job: int, folder: Path) -> list[Result]:
        """The results, by rank, once all have ended; a job that hangs is ended at its limit."""
        while not (status := self.ask("poll", job=job, seconds=2.0))["done"]:
            pass
        logs = [folder / f"rank-{rank}.log" for rank in range(len(status["codes"]))]
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        return [
            Result(rank, rank // self.ranks, code, texts[rank], status["reason"])
            for rank, code in enumerate(status["codes"])
        ]

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        seconds: float = 300.0,
        grace: float = 10.0,
        cwd: Path | None = None,
    ) -> list[Result]:
        """Run a command on every rank, with this process's variables and ``env`` on top.

        It is ended after ``seconds``, or ``grace`` seconds after a rank has failed.
        """
        return self.results(*self.started(command, env, seconds, grace, cwd))

    def bytes(self, host: int) -> tuple[int, int]:
        """Bytes a host's interface has (sent, received) since the lab began."""
        counters = self.ask("counted", host=self.host(host))
        return int(counters["sent"]), int(counters["received"])

    def host(self, host: int) -> int:
        """The host's number; InputError where there is no such host."""
        if not 0 <= host < self.hosts:
            raise InputError(f"there is no host {host}: the lab has {self.hosts}, counted from 0")
        return host

    def ask(self, verb: str, **details: Any) -> dict[str, Any]:
        """One request to the keeper; its complaint becomes an InputError."""
        if not self.name:
            raise InputError("the lab has not been started: use it in a with statement")
        try:
            with socket.socket(socket.AF_UNIX) as talk:
                talk.settimeout(START_SECONDS)
                talk.connect(str(self._folder / "socket"))
                talk.sendall(json.dumps({"verb": verb, **details}).encode() + b"\n")
                with talk.makefile("rb") as lines:
                    line = lines.readline()
            if not line.endswith(b"\n"):
                raise ConnectionError("it went before its answer was whole")
        except OSError as error:
            raise InputError(
                f"the lab {self.name} doesn't answer, it has ended ({error})"
            ) from None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InputError(f"the lab {self.name}: {answer['error']}")
        return answer


def _first_line(watchdog: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Returns the keeper's message when it is ready; empty if it ends or takes too long."""
    assert watchdog.stdout is not None
    with selectors.DefaultSelector() as waiting, watchdog.stdout as lines:
        waiting.register(lines, selectors.EVENT_READ)
        if waiting.select(START_SECONDS):
            with contextlib.suppress(ValueError):
                message: dict[str, Any] = json.loads(lines.readline())
                return message
    return {}


if __name__ == "__main__":
    watchdog(Path(sys.argv[1]))
