"""The keeper of a lab, and the watchdog that ends it.

    Lab -> watchdog -> keeper -> ranks

The **watchdog** moves into new namespaces and waits. The **keeper** is the first
process in a namespace of process numbers. When it ends, the kernel ends everything
inside (pid_namespaces(7)). The network namespaces end too, because they have no other
owner. The keeper dies with the watchdog. The watchdog ends the keeper when the
lab's owner closes its pipe or is gone, and removes the lab's folder. So any of them can
be killed, and at worst a folder remains.

Requests come through a socket in the lab's folder: one line of JSON each, one line
back. The machine's own network namespace is never entered, so it can't be changed.

Without a delay and a loss, links are those of ``network``. Else each host has a TUN device, and a
switch in user space (``packet_link``) joins them: it can delay and lose packets too, and costs a
share of a core.
Nothing here imports torch, whose threads would keep this process out of namespaces of users. Run as
``python tools/netlab/keeper.py FOLDER``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from netlab.job import COUNTS, PORT, LabJob, LabRank
from netlab.network import (
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
    born,
    die_with_parent,
    error_text,
    inside,
    interface_bytes,
    ip,
    lines_inside,
    mount_own_proc,
    new_network,
    unshare,
)
from netlab.packet_link import DELAY, LOSS, LinkSettings

TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI


class UserSpaceSwitch:
    """Hosts on a switch in user space."""

    def __init__(self, hosts: int, mtu: int) -> None:
        self._hosts = [new_network() for _ in range(hosts)]
        devices = []
        for host, fd in enumerate(self._hosts):
            with inside(fd):
                devices.append(_open_tun(NIC))
                ip(lines_inside(host, mtu))
        self._settings = LinkSettings(hosts)
        given = [self._settings.descriptor, *devices]
        self._switch = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("packet_link.py")), *map(str, given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=given,
            preexec_fn=die_with_parent,  # the keeper's first thread, which lasts
        )
        assert self._switch.stdout is not None
        if not self._switch.stdout.readline():
            raise OSError("the switch in user space did not start: see keeper.log")
        for device in devices:
            os.close(device)

    def namespace(self, host: int) -> int | None:
        return self._hosts[host]

    def limit(self, bits: float) -> None:
        for host in range(len(self._hosts)):
            self._settings.rate(host, bits)

    def shape(self, delay: float, loss: float) -> None:
        self._settings.numbers[DELAY] = delay
        self._settings.numbers[LOSS] = loss

    def cut(self, host: int, cut: bool) -> None:
        self._settings.cut(host, cut)

    def counted(self, host: int) -> tuple[int, int]:
        with inside(self._hosts[host]):
            return interface_bytes(NIC)


def _open_tun(name: str) -> int:
    """A network device of this thread's namespace whose packets are read and written here."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    except OSError:
        os.close(device)
        raise
    return device


LOOK_SECONDS = 0.2  # how often the watchdog looks for its keeper and the owner


class Keeper:
    """A lab's network and jobs; each method that ``VERBS`` names answers one request."""

    VERBS = ("start", "poll", "end", "counted", "limit", "cut")

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder, self.spec = folder, spec
        self.jobs: list[LabJob] = []
        self.apart = spec["mode"] != "loopback"
        self.network: Network = LoopbackNetwork()
        if self.apart:
            hosts, mtu = spec["hosts"], spec["mtu"]
            self.network = (UserSpaceSwitch if spec["switch"] else VethBridge)(hosts, mtu)
        self.network.limit(spec["bits"])
        self.network.shape(spec["delay"], spec["loss"])

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
        counts = {}
        if not self.apart:
            (folder / "counts").mkdir(exist_ok=True)
            counts[COUNTS] = str(folder / "counts")
        return {
            **counts,
            "HASTEN_NETLAB_RANKS_PER_HOST": str(ranks),
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
        """Bytes that a host sent and received so far; without interfaces, what ranks counted."""
        if self.apart:
            sent, received = self.network.counted(host)
            return {"sent": sent, "received": received}
        ranks = self.spec["ranks"]
        sent = received = 0
        for path in self.folder.glob("job-*/counts/*.json"):
            noted: Mapping[str, Any] = json.loads(path.read_text())
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

    def cut(self, host: int, cut: bool) -> dict[str, Any]:
        """Cut a host's link, or heal it."""
        self.network.cut(host, cut)
        return {}

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


def _keep(folder: Path, spec: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Runs the keeper: builds the hosts, reports that, and answers until it is ended."""
    die_with_parent()
    if spec["mode"] != "loopback":
        unshare(NEW_MOUNTS)  # here, so that the watchdog still sees the owner in /proc
        mount_own_proc()
    try:
        keeper = Keeper(folder, spec)
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


def watchdog(folder: Path) -> None:  # noqa: C901  # in order
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
            _keep(folder, spec, tell)
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


if __name__ == "__main__":
    watchdog(Path(sys.argv[1]))
