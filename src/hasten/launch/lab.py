"""Hosts as network namespaces on this machine, with rate-limited links and commands.

    with Lab(hosts=2, rate="100mbit") as lab:
        results = lab.run(["bash", "job.sh"])
        sent, received = lab.bytes(0)

A lab is three kinds of process: Lab -> verification -> keeper -> ranks. Commands run on
the hosts' ranks.

The **verification** moves into new namespaces and waits. The **keeper** is the first
process in a namespace of process numbers. When it ends, the kernel ends everything
inside (pid_namespaces(7)). The network namespaces end too, because they have no other
owner. The keeper dies with the verification. The verification ends the keeper when the
lab's owner closes its pipe or is gone, and removes the lab's folder. So any of them can
be killed, and at worst a folder remains.

Requests come through a socket in the lab's folder: one line of JSON each, one line
back. The machine's own network namespace is never entered, so it can't be changed.
Nothing here imports torch. The verification runs as
``python -m hasten.launch.lab FOLDER``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from hasten.errors import InputError
from hasten.machine import environment

# The few Linux calls that the standard library lacks: namespaces, mounts, what a parent leaves.
#
# Python has ``os.unshare`` and ``os.setns`` from 3.12 on; until then libc is called. A network
# namespace belongs to a thread: what a thread starts while it is ``inside`` one, lives there.

NEW_MOUNTS, NEW_USER, NEW_PIDS, NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
DEATH_SIGNAL, SUBREAPER = 1, 36  # prctl(2)
PRIVATE_AND_BELOW = 0x40000 | 0x4000  # MS_PRIVATE | MS_REC, mount(2)
NETWORK_OF_THREAD = "/proc/thread-self/ns/net"  # /proc/self is the first thread's
LINUX = sys.platform == "linux"


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def error_text(error: Exception) -> str:
    """Returns an error's text, without the number that Python puts before it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; with NEW_USER this process must have a single thread."""
    _call("unshare", ctypes.c_int(flags))


def become_root_of_own_users(user: int, group: int) -> None:
    """In a new user namespace, call the user root: nothing outside becomes allowed by it."""
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def mount_own_proc() -> bool:
    """Show the new process numbers under /proc; False where a container doesn't allow it."""
    try:
        _call("mount", None, b"/", None, ctypes.c_ulong(PRIVATE_AND_BELOW), None)
        _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None)
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends."""
    if LINUX:
        _call("prctl", ctypes.c_int(DEATH_SIGNAL), ctypes.c_ulong(signal.SIGKILL))


def new_network() -> int:
    """A new network namespace, alive as long as the returned descriptor; the thread stays."""
    before = os.open(NETWORK_OF_THREAD, os.O_RDONLY)
    try:
        unshare(NEW_NET)
        made = os.open(NETWORK_OF_THREAD, os.O_RDONLY)
        _call("setns", ctypes.c_int(before), ctypes.c_int(NEW_NET))
    finally:
        os.close(before)
    return made


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """This thread in a network namespace; processes started here stay in it."""
    before = os.open(NETWORK_OF_THREAD, os.O_RDONLY)
    try:
        _call("setns", ctypes.c_int(network), ctypes.c_int(NEW_NET))
        try:
            yield
        finally:
            _call("setns", ctypes.c_int(before), ctypes.c_int(NEW_NET))
    finally:
        os.close(before)


def interface_bytes(name: str) -> tuple[int, int]:
    """Bytes (sent, received) of an interface of this thread's network namespace.

    These are the counters of /sys/class/net, where a mount would be needed to see a namespace's.
    """
    with open("/proc/thread-self/net/dev") as file:
        for line in file:
            device, _, numbers = line.partition(":")
            if device.strip() == name:
                fields = numbers.split()
                return int(fields[8]), int(fields[0])
    raise OSError(f"no interface {name} in this network namespace")


# Hosts and their links.

NIC = "eth0"
TOOL_SECONDS = 20  # a call of ip or tc that takes longer is given up


def address(host: int) -> str:
    """The address of a host."""
    return f"10.77.0.{host + 1}"


class Network(Protocol):
    """Operations of a keeper on its hosts; ``namespace`` is None if a host has none."""

    def namespace(self, host: int) -> int | None: ...
    def limit(self, bits: float) -> None: ...
    def counted(self, host: int) -> tuple[int, int]: ...


class VethBridge:
    """Hosts on a bridge in the keeper's own namespace: a veth pair each, limited by tbf."""

    def __init__(self, hosts: int, mtu: int) -> None:
        self._hosts = [new_network() for _ in range(hosts)]
        lines = [f"link add br0 mtu {mtu} type bridge", "link set br0 addrgenmode none up"]
        for host, fd in enumerate(self._hosts):
            lines += [
                f"link add p{host} mtu {mtu} type veth peer name {NIC} mtu {mtu}",
                f"link set {NIC} netns /proc/self/fd/{fd}",
                f"link set p{host} master br0 addrgenmode none up",
            ]
        ip(lines, self._hosts)
        for host, fd in enumerate(self._hosts):
            with inside(fd):
                ip(lines_inside(host, mtu))

    def namespace(self, host: int) -> int | None:
        return self._hosts[host]

    def limit(self, bits: float) -> None:
        for host, fd in enumerate(self._hosts):
            _token_bucket(f"p{host}", bits)
            with inside(fd):
                _token_bucket(NIC, bits)

    def counted(self, host: int) -> tuple[int, int]:
        with inside(self._hosts[host]):
            return interface_bytes(NIC)


class LoopbackNetwork:
    """Hosts that are groups of processes on the machine's loopback interface."""

    def namespace(self, host: int) -> int | None:
        return None

    def limit(self, bits: float) -> None:
        if bits:
            raise OSError("plain loopback processes have no links to limit")

    def counted(self, host: int) -> tuple[int, int]:
        raise OSError("plain loopback processes have no interface of their own")


def lines_inside(host: int, mtu: int) -> list[str]:
    """Lines for ``ip`` that set up a host's interface, in its namespace."""
    return [
        "link set lo up",
        f"link set {NIC} addrgenmode none mtu {mtu} txqueuelen 1000",
        f"addr add {address(host)}/24 dev {NIC}",
        f"link set {NIC} up",
    ]


def _token_bucket(device: str, bits: float) -> None:
    if not bits:
        _run(["tc", "qdisc", "del", "dev", device, "root"], may_fail=True)  # there may be none
        return
    rate, burst = f"{round(bits)}bit", str(burst_bytes(bits))
    kind = ["tbf", "rate", rate, "burst", burst, "latency", "200ms"]
    _run(["tc", "qdisc", "replace", "dev", device, "root", *kind])


def ip(lines: Sequence[str], descriptors: Sequence[int] = ()) -> None:
    """Run lines of the tool ip where this thread is."""
    _run(["ip", "-batch", "-"], "\n".join(lines) + "\n", descriptors)


def _run(
    command: list[str], text: str = "", descriptors: Sequence[int] = (), may_fail: bool = False
) -> None:
    """Run a tool where this thread is; what it complains of becomes the error."""
    if shutil.which(command[0]) is None:
        raise OSError(f"the command {command[0]} is missing: install iproute2")
    try:
        completed = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=TOOL_SECONDS,
            pass_fds=descriptors,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command[:2])} did not end within {TOOL_SECONDS} s") from None
    if completed.returncode and not may_fail:
        error_lines = completed.stderr.strip().splitlines() or ["no reason given"]
        raise OSError(f"{' '.join(command[:2])}: {error_lines[0].removeprefix('Error: ')}")


# Rates as people write them: ``100mbit``, ``2.5gbit``, none for no limit; bits a second.

SEGMENT = 80 * 1024  # bytes that TCP hands down at once, with the headers of all their packets
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LOWEST, HIGHEST = 8e3, 400e9


def bits_per_second(rate: str | float | None) -> float:
    """A rate as a number of bits a second; 0 for no limit."""
    if rate is None or rate == "none":
        return 0.0
    if isinstance(rate, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", rate.strip().lower())
        if match is None:
            raise InputError(f"{rate!r} is no rate: write 100mbit, 1gbit, 500kbit or none")
        rate = float(match[1]) * UNITS[match[2]]
    if not LOWEST <= rate <= HIGHEST:
        raise InputError(f"a link of {rate:g} bit/s can't be made: 8kbit to 400gbit can")
    return float(rate)


def burst_bytes(bits: float) -> int:
    """Returns the bytes that may pass at once.

    They are 4 ms of the rate, and at least one segment as TCP passes it down. If the bucket
    is smaller, each segment is cut into packets on the sender's core. Then the receiver is
    woken for every packet. Network cards avoid both.
    """
    return max(SEGMENT, round(bits / 8 * 0.004))


# The folder of a lab: its socket, its logs, and a manifest that says which process keeps it.
#
# Namespaces of a lab have no name anywhere: they live as long as the lab's keeper, a process. So
# all that a lab can leave behind is its folder, whose name is random.

KIND = "hasten netlab"
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


# Ranks of one command on a lab's hosts: started together, ended together, never left alone.
#
# When a rank fails, the others have some seconds to say what they noticed, since that is what a
# test of a broken link looks at; then they are asked to end, and then they are ended. A rank's own
# children go with it.

SECONDS_TO_LEAVE = 5.0  # between being asked to end and being ended
PORT = 29500  # torch's usual one; each host has its own ports


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


# The keeper, and the verification that ends it.

LOOK_SECONDS = 0.2  # how often the verification looks for its keeper and the owner


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
        unshare(NEW_MOUNTS)  # here, so that the verification still sees the owner in /proc
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


def verification(folder: Path, kind: type[Keeper] = Keeper) -> None:  # noqa: C901, PLR0915  # in order
    """Be the verification: leave for new namespaces, start the keeper, and clean up after it."""
    spec = json.loads((folder / "spec.json").read_text())

    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(message).encode() + b"\n")

    process = os.getpid()
    noted = {"kind": KIND, "name": folder.name, "process": process, "born": born(process), **spec}
    temporary_path = folder / "manifest.writing"  # whole or not there at all
    temporary_path.write_text(json.dumps(noted, indent=1))
    os.replace(temporary_path, folder / "manifest.json")
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
    if LINUX:  # become the parent of descendants whose own parent ends
        _call("prctl", ctypes.c_int(SUBREAPER), ctypes.c_ulong(1))
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
        """Returns True if the owner lives.

        Its pipe can outlive it in a process that it forked.
        """
        return owner["born"] is None or born(owner["process"]) == owner["born"]

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = spec["owner"]
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if owner is None:
            time.sleep(LOOK_SECONDS)
        elif select.select([0], [], [], LOOK_SECONDS)[0] or not is_alive(owner):
            end(0, None)
            os.waitpid(child, 0)
            break
    # Without a namespace of process numbers, what the ranks had started falls to this process.
    children = Path(f"/proc/{process}/task/{process}/children")
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

    # how Python runs its verification
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
        self._guard: subprocess.Popen[bytes] | None = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._spec: dict[str, Any] = {
            "hosts": hosts,
            "ranks": ranks,
            "mtu": 1500,
            "bits": bits_per_second(rate),
            "cores": cores or 1,
        }

    def start(self, stay: bool = False) -> Self:
        """Build it. With ``stay`` it outlives this process, and ends with its verification."""
        links = self._spec["bits"] or self._spec.get("switch")
        tried = []
        for mode in MODES if self.asked == "auto" else (self.asked,):
            if mode == "loopback" and links:
                tried.append("loopback: plain processes have no links to limit or delay")
                continue
            complaint = self.attempt(mode, stay)
            if not complaint:
                return self
            tried.append(f"{mode}: {complaint}")
        raise InputError(f"no lab works here ({'; '.join(tried)}): see tools/netlab/README.md")

    def attempt(self, mode: Mode, stay: bool = False) -> str:
        """Build it in one mode; the complaint if it can't be."""
        if mode != "loopback" and sys.platform != "linux":
            return "network namespaces are Linux's"
        folder = room() / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
        process = os.getpid()
        owner = None if stay else {"process": process, "born": born(process)}
        (folder / "spec.json").write_text(json.dumps({**self._spec, "mode": mode, "owner": owner}))
        with (folder / "keeper.log").open("wb") as log:
            verification = subprocess.Popen(
                [sys.executable, *self.KEEPER, str(folder)],
                stdin=subprocess.DEVNULL if stay else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        answer = _first_line(verification)
        if not answer.get("ready"):
            log_text = (folder / "keeper.log").read_text() if folder.exists() else ""
            verification.terminate()
            verification.wait()
            shutil.rmtree(folder, ignore_errors=True)
            last = (log_text.strip().splitlines() or ["its keeper ended without a word"])[-1]
            return str(answer.get("error", last))
        self.mode, self._guard = mode, verification
        self.called(folder)
        return ""

    def called(self, folder: Path) -> None:
        """From now on this is the lab of that folder."""
        self.name, self._folder = folder.name, folder

    def __enter__(self) -> Self:
        return self if self.name else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in it and remove it; a lab that stays is left alone."""
        if self._guard is None or self._guard.stdin is None:
            return
        self._guard.stdin.close()
        try:
            self._guard.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        self._guard = None

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


def _first_line(verification: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Returns the keeper's message when it is ready; empty if it ends or takes too long."""
    assert verification.stdout is not None
    with selectors.DefaultSelector() as waiting, verification.stdout as lines:
        waiting.register(lines, selectors.EVENT_READ)
        if waiting.select(START_SECONDS):
            with contextlib.suppress(ValueError):
                message: dict[str, Any] = json.loads(lines.readline())
                return message
    return {}


if __name__ == "__main__":
    verification(Path(sys.argv[1]))
