"""Hosts of a lab as network namespaces, and their rate-limited links (Linux, iproute2).

Namespaces and mounts are libc's calls, links those of the commands ip and tc. Nothing here imports
torch: its threads would keep a process out of namespaces of users.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hasten.errors import InputError

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


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose their own parent."""
    if LINUX:
        _call("prctl", ctypes.c_int(SUBREAPER), ctypes.c_ulong(1))


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


def born(process: int) -> int | None:
    """When a process started, in clock ticks since boot, or None if there is none (proc(5))."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a command's name may contain anything
    return None if fields[0] in "ZX" else int(fields[19])


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
    def shape(self, delay: float, loss: float) -> None: ...
    def cut(self, host: int, cut: bool) -> None: ...
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

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("these links have no delay and no loss: make the lab with one of them")

    def cut(self, host: int, cut: bool) -> None:
        ip([f"link set p{host} {'down' if cut else 'up'}"])

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

    def shape(self, delay: float, loss: float) -> None:
        if delay or loss:
            raise OSError("plain loopback processes have no links to delay")

    def cut(self, host: int, cut: bool) -> None:
        raise OSError("plain loopback processes have no links to cut")

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
