"""Inside a zygote: it forks a child for every task that comes, and tells how each has ended.

Its controller, and why there is such a process: `nursery`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.machine.processes import end_with_parent

LONGEST = 1 << 16  # bytes of a message


@dataclass(frozen=True)
class ForkTask:
    """What a child has to do, and the numbers of its pipes."""

    task: Any
    pipes: tuple[int, ...]


def forked(descriptor: int) -> ForkTask | None:
    """Fork a child for each task that comes, in a zygote that has imported everything.

    Returns:
        In each child its task, to go on with; in the zygote None when the controller has gone.
    """
    control = socket.socket(fileno=descriptor)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    living: set[int] = set()
    while True:
        both: list[Any] = [control, woken]
        ready, _, _ = select.select(both, [], [])
        if woken in ready:
            os.read(woken, LONGEST)
            for child, code in _ended(living):
                living.remove(child)
                _tell(control, {"ended": child, "code": code})
        if control not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, LONGEST, 8)
        if not data:
            return None
        message = json.loads(data)
        if "free" in message:
            os.waitpid(message["free"], 0)
            continue
        zygote, child = os.getpid(), os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for own in (woken, wake):
                os.close(own)
            control.close()
            return _born(zygote, message["task"], descriptors)
        living.add(child)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        for number in descriptors:
            os.close(number)
        _tell(control, {"born": child})


def _born(zygote: int, task: Any, descriptors: Sequence[int]) -> ForkTask:
    """In a child: a group of its own, its log, and an end with the zygote."""
    end_with_parent()
    if os.getppid() != zygote:
        os._exit(1)  # it was gone before the kernel could be asked
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    *pipes, log = descriptors
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    return ForkTask(task, tuple(pipes))


def _ended(living: set[int]) -> list[tuple[int, int]]:
    """Children that have ended, and how; their numbers stay theirs."""
    found = []
    for child in living:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, child, flags)
        if info is not None:
            normal = info.si_code == os.CLD_EXITED
            found.append((child, info.si_status if normal else -info.si_status))
    return found


def _tell(control: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the controller has gone: the end of the socket says so
        control.send(json.dumps(message).encode())
