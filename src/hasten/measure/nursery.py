"""Processes that are ready at once: forked from one that has imported everything they need.

Importing torch and transformers takes seconds of a core, for every process anew. A zygote (the word
is Android's, for the process from which all others are forked) imports them once and then waits:

  1. the controller asks for a process: a task, and descriptors of its pipes and of its log
  2. the zygote forks; the child goes on with the task as if it had been started for it (`zygote`)
  3. how a child ended is told to the controller, which alone decides when its number is free again

What libraries read when they are loaded (allocator, OpenMP) can't change any more, so that there is
a zygote for each environment. Nothing has run in it but imports: no thread of torch's own would
survive a fork, nor a device that was opened, so machines with accelerators have none
(fork(2); pthread_atfork(3) on what a child may do).
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hasten.machine import environment, host, processes
from hasten.measure.crew import ArmProcess, Start
from hasten.measure.zygote import LONGEST

MOST = 6  # zygotes
RESIDENT = 0.45e9  # bytes that one has: torch, transformers and hasten
SHARE = 0.12  # of the memory that is free, for all of them
BIRTH_SECONDS = 120.0  # for the imports, of which nothing is known; then it hangs


@contextlib.contextmanager
def nursery(
    arguments: Sequence[str], log: Path, device: str, ranks: int = 1
) -> Iterator[Nursery | None]:
    """A nursery whose zygotes write to ``log``; None where processes can't be forked."""
    if sys.platform != "linux" or not device.startswith("cpu") or ranks > 1:
        yield None
        return
    free = processes.available_bytes(host.hardware().memory_limit_bytes)
    most = max(1, min(MOST, int(SHARE * free / RESIDENT)))
    with log.open("wb") as words, contextlib.closing(Nursery(arguments, words, most)) as found:
        yield found


class Nursery:
    """Zygotes by environment, started when they are first needed.

    Args:
        arguments: of the interpreter for a zygote's program, which calls `zygote.forked`; the
            number of its descriptor is added.
        log: where zygotes' own words go.
        most: zygotes; of those without a living child the oldest goes.
    """

    def __init__(self, arguments: Sequence[str], log: IO[bytes], most: int = MOST) -> None:
        self._arguments, self._log, self._most = arguments, log, most
        self._zygotes: dict[frozenset[tuple[str, str]], _Zygote] = {}

    def process(
        self, task: Any, environ: Mapping[str, str], pipes: Sequence[int], log: IO[bytes]
    ) -> Forked:
        """A process with this task; it leads a group of its own.

        Args:
            task: plain values, which `zygote.forked` hands to the program.
            environ: variables beside this process's own.
            pipes: descriptors that it has as well; it is told their numbers.
            log: where its words go.
        """
        return self._zygote(environ).ask(task, [*pipes, log.fileno()])

    def prepare(self, environ: Mapping[str, str]) -> None:
        """Let everything be imported for processes that will be asked for with these variables."""
        self._zygote(environ)

    def _zygote(self, environ: Mapping[str, str]) -> _Zygote:
        key = frozenset(environ.items())
        found = self._zygotes.pop(key, None)
        idle = [key for key, one in self._zygotes.items() if not one.children]
        for old in idle[: max(len(self._zygotes) + 1 - self._most, 0)]:
            self._zygotes.pop(old).end()
        if found is None or not found.alive:
            found = _Zygote(self._arguments, environ, self._log)
        self._zygotes[key] = found  # the newest
        return found

    def ready(self, environ: Mapping[str, str]) -> bool:
        """Whether a process with these variables wouldn't have to wait for imports."""
        zygote = self._zygotes.get(frozenset(environ.items()))
        return zygote is not None and zygote.alive

    def starting(self, task: Any) -> Start:
        """How a crew of one process starts it, with this task."""

        def start(
            environ: Mapping[str, str], pipes: tuple[int, int], log: IO[bytes], group: int | None
        ) -> ArmProcess:
            if group is not None:
                raise ValueError("a forked process leads a group of its own")
            return self.process(task, environ, pipes, log)

        return start

    def close(self) -> None:
        """End all, and what was forked from them."""
        while self._zygotes:
            self._zygotes.popitem()[1].end()


class _Zygote:
    """The controller's end of one."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, *arguments, str(there.fileno())],
                pass_fds=[there.fileno()],
                env=environment.child_environment(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._asked = 0
        self.born: list[int] = []  # in the order in which they were asked for
        self.codes: dict[int, int] = {}  # of children that have ended
        self.children: set[int] = set()  # by their places there: not waited for yet

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: Any, descriptors: Sequence[int]) -> Forked:
        place, self._asked = self._asked, self._asked + 1
        self.children.add(place)
        message = json.dumps({"task": task}).encode()
        with contextlib.suppress(OSError):  # it is dead, which `poll` will see
            socket.send_fds(self._socket, [message], list(descriptors))
        return Forked(self, place)

    def hear(self, seconds: float) -> bool:
        """Take in one message; False: there was none."""
        try:
            if not select.select([self._socket], [], [], max(seconds, 0.0))[0]:
                return False
            data = self._socket.recv(LONGEST)
        except OSError:
            data = b""
        if not data:
            self._process.wait()  # its end of the socket is closed when it is gone
            return False
        said = json.loads(data)
        if "born" in said:
            self.born.append(said["born"])
        else:
            self.codes[said["ended"]] = said["code"]
        return True

    def free(self, place: int) -> None:
        """A child has been waited for: its number may be given to others."""
        self.children.discard(place)
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"free": self.born[place]}).encode())

    def end(self) -> int:
        """At once; the kernel ends its children with it. Its code."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return self._process.wait()


@dataclass
class Forked:
    """A child of a zygote, as far as it is like a `subprocess.Popen`."""

    _zygote: _Zygote
    _place: int
    returncode: int | None = field(default=None, init=False)

    @property
    def pid(self) -> int:
        """Its number. Raises ProcessLookupError where the zygote has died before it was forked."""
        deadline = time.monotonic() + BIRTH_SECONDS
        while len(self._zygote.born) <= self._place:
            if not self._zygote.alive:
                raise ProcessLookupError(f"process {self._place} was never forked")
            self._zygote.hear(deadline - time.monotonic())
            if time.monotonic() > deadline:
                self._zygote.end()
        return self._zygote.born[self._place]

    def poll(self) -> int | None:
        """Its code once it has ended (that of a signal negative), as Popen has it."""
        while self.returncode is None and self._zygote.alive and self._zygote.hear(0.0):
            self._settle()
        return self._settle()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._zygote.hear(min(left, BIRTH_SECONDS))
        return code

    def _settle(self) -> int | None:
        if self.returncode is not None:
            return self.returncode
        born = self._zygote.born
        number = born[self._place] if len(born) > self._place else None
        if number in self._zygote.codes:
            self.returncode = self._zygote.codes.pop(number)  # may soon be another child's
            self._zygote.free(self._place)
        elif not self._zygote.alive:
            self.returncode = -signal.SIGKILL if number is not None else self._zygote.end()
            self._zygote.children.discard(self._place)
        return self.returncode
