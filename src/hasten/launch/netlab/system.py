"""The few Linux calls that the standard library lacks: namespaces, mounts, what a parent leaves.

Python has ``os.unshare`` and ``os.setns`` from 3.12 on; until then libc is called. A network
namespace belongs to a thread: what a thread starts while it is ``inside`` one, lives there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import sys
from collections.abc import Iterator

NEW_MOUNTS, NEW_USER, NEW_PIDS, NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
DEATH_SIGNAL, SUBREAPER = 1, 36  # prctl(2)
PRIVATE_AND_BELOW = 0x40000 | 0x4000  # MS_PRIVATE | MS_REC, mount(2)
NETWORK_OF_THREAD = "/proc/thread-self/ns/net"  # /proc/self is the first thread's
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI
LINUX = sys.platform == "linux"


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def words(error: Exception) -> str:
    """What went wrong, without the number that Python puts before it."""
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


def inherit_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
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


def open_tun(name: str) -> int:
    """A network device of this thread's namespace whose packets are read and written here."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    except OSError:
        os.close(device)
        raise
    return device


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


def children(process: int) -> list[int]:
    """Numbers of a process's children."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/task/{process}/children") as file:
        return [int(number) for number in file.read().split()]
    return []
