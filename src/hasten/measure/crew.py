"""The processes of one arm: they are given orders, answer them, and are stopped between two turns.

  1. each process is started with two pipes that carry one JSON object per line: orders, answers
  2. an order lets all of them go on (SIGCONT), goes to each, and is done when each has answered
  3. then all are stopped (SIGSTOP) until the next order; or sooner, where an order is worked at in
     parts (`Crew.go_on`)

Threads that spin while they wait, or that read ahead, and workers of a data loader would otherwise
take cores from the arm whose turn it is, or do work that their own next turn should pay for. What
an arm's processes start belongs to the same process group, so that one signal reaches all of it. An
arm of several ranks is several processes: stopped together, no rank ever waits for one that sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from hasten.errors import InputError
from hasten.machine import environment

LEAVE_SECONDS = 5.0  # for processes to end by themselves once there are no more orders
SETTLE_SECONDS = 0.3  # after a first failure among ranks, for the one that caused it to show
LAST_WORDS = 1 << 16  # bytes of a log
CONSEQUENCE = -signal.SIGABRT  # gloo aborts ranks whose peer is gone: seldom the first cause
Answer = dict[str, Any]
ALONE: Sequence[Mapping[str, str]] = ({},)  # one process, which needs no place among ranks


class ArmProcess(Protocol):
    """What a crew asks of a process; `subprocess.Popen` is one."""

    returncode: int | None

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


# Starts a process: its variables, the pipes of orders and of answers, its log, and the process
# whose group it joins (None: one of its own).
Start = Callable[[Mapping[str, str], tuple[int, int], IO[bytes], int | None], ArmProcess]


class CrewFailedError(RuntimeError):
    """A process died, hung, or reported an error; the message says which."""


@dataclass
class _Member:
    process: ArmProcess
    orders: int  # descriptors of the pipes
    answers: int
    log: IO[bytes]
    unread: bytes = b""

    def read(self) -> bool:
        """Take in what has come, to be called when something has; False: no more ever will."""
        piece = os.read(self.answers, 1 << 16)
        self.unread += piece
        return bool(piece)

    def next(self) -> str | None:
        """The next whole line."""
        line, end, rest = self.unread.partition(b"\n")
        if not end:
            return None
        self.unread = rest
        return line.decode(errors="replace")

    def last_words(self) -> str:
        """How the process ended."""
        try:
            code: object = self.process.wait(timeout=LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            code = "unknown"
        size = os.fstat(self.log.fileno()).st_size
        said = os.pread(self.log.fileno(), LAST_WORDS, max(0, size - LAST_WORDS))
        words = said.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else "it said nothing"
        if code == -signal.SIGKILL:
            why = "killed, most likely for want of memory"
        return f"the process ended with code {code}: {why}"


class Crew:
    """One process for each rank of an arm, just started.

    Args:
        start: starts one of them (see `interpreter`).
        environs: variables of each process; there are as many processes.
        logs: files, one for each, open for reading too: where its own words go.
    """

    def __init__(
        self,
        start: Start,
        environs: Sequence[Mapping[str, str]],
        logs: Sequence[IO[bytes]],
    ) -> None:
        self._members: list[_Member] = []
        self._heard: dict[int, Answer | str] = {}  # of the answers that are still to come
        try:
            for environ, log in zip(environs, logs, strict=True):
                self._members.append(self._started(start, environ, log))
        except BaseException:
            self.end(at_once=True)
            raise

    def ask(self, order: Mapping[str, Any], patience: float) -> list[Answer]:
        """Give all an order and wait for the answers, so many seconds at most.

        Raises:
            CrewFailedError: there is no answer to be had.
        """
        self._signal("SIGCONT")
        self.give(order)
        return self.answers(patience)

    def give(self, order: Mapping[str, Any]) -> None:
        """Give all an order, which they see once they go on (`answers`, `go_on`).

        Raises:
            CrewFailedError: one has ended.
        """
        line = (json.dumps(order) + "\n").encode()
        for place, member in enumerate(self._members):
            try:
                os.write(member.orders, line)
            except OSError as error:
                raise self._failure({place: member.last_words()}) from error

    def answers(self, patience: float) -> list[Answer]:
        """The next answer of each; the first ones, after the start, say that all are ready.

        Raises:
            CrewFailedError: see above.
        """
        found = self._heard_within(patience)
        if found is None:
            silent = self._silent(self._heard)
            raise CrewFailedError(f"no answer within {patience:.0f} s: {silent}")
        return found

    def go_on(self, seconds: float) -> list[Answer] | None:
        """Let all go on for so long, or until each has answered; they are stopped after it.

        Returns:
            The answers; None if some are still to come.

        Raises:
            CrewFailedError: see above.
        """
        self._signal("SIGCONT")
        found = self._heard_within(seconds)
        if found is None:
            self._signal("SIGSTOP")
        return found

    def _heard_within(self, seconds: float) -> list[Answer] | None:
        """The answers, once each has given its own and all are stopped; None: not in that time."""
        deadline = time.monotonic() + seconds
        while len(self._heard) < len(self._members):
            if not self._hear(self._heard, deadline):
                return None
            if any(isinstance(answer, str) for answer in self._heard.values()):
                raise self._failure(self._heard)
        self._signal("SIGSTOP")
        heard, self._heard = self._heard, {}
        found = (heard[place] for place in range(len(self._members)))
        return [answer for answer in found if not isinstance(answer, str)]

    def end(self, at_once: bool = False) -> None:
        """End all processes, ``at_once`` if they hang; harmless when they have ended."""
        if at_once:
            self._signal("SIGKILL")
        self._signal("SIGCONT")
        for member in self._members:
            for descriptor in (member.orders, member.answers):
                if descriptor >= 0:
                    os.close(descriptor)  # an end of orders lets it leave by itself
            member.orders = member.answers = -1
        deadline = time.monotonic() + LEAVE_SECONDS
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(timeout=max(deadline - time.monotonic(), 0))
        self._signal("SIGKILL")
        for member in self._members:
            member.process.wait()

    def _started(self, start: Start, environ: Mapping[str, str], log: IO[bytes]) -> _Member:
        group = self._members[0].process.pid if self._members else None
        orders_read, orders_write = os.pipe()
        answers_read, answers_write = os.pipe()
        try:
            process = start(environ, (orders_read, answers_write), log, group)
        except BaseException:
            os.close(orders_write)
            os.close(answers_read)
            raise
        finally:
            os.close(orders_read)
            os.close(answers_write)
        return _Member(process, orders_write, answers_read, log)

    def _hear(self, heard: dict[int, Answer | str], deadline: float) -> bool:
        """Note what those say that haven't answered yet, a failure as text; False: too late."""
        waiting = [place for place in range(len(self._members)) if place not in heard]
        for place in waiting:
            line = self._members[place].next()
            if line is not None:
                heard[place] = _understood(line)
                return True
        pipes = {self._members[place].answers: place for place in waiting}
        ready, _, _ = select.select(list(pipes), [], [], max(deadline - time.monotonic(), 0))
        for pipe in ready:
            member = self._members[pipes[pipe]]
            if not member.read():
                heard[pipes[pipe]] = member.last_words()
        return bool(ready)

    def _failure(self, heard: dict[int, Answer | str]) -> CrewFailedError:
        """Of ranks that fail together the one to name: killed ones before those that complain."""
        failed = [place for place, answer in heard.items() if isinstance(answer, str)]
        if len(self._members) == 1:
            return CrewFailedError(str(heard[0]))
        until = time.monotonic() + SETTLE_SECONDS
        while len(heard) < len(self._members) and self._hear(heard, until):
            pass
        more = [p for p, answer in heard.items() if isinstance(answer, str) and p not in failed]
        codes = {p: self._members[p].process.poll() or 0 for p in (*failed, *more)}
        killed = [p for p, code in codes.items() if code < 0 and code != CONSEQUENCE]
        cause = (killed or failed)[0]
        return CrewFailedError(f"rank {cause}: {heard[cause]}")

    def _silent(self, heard: Mapping[int, Any]) -> str:
        if len(self._members) == 1:
            return "it hangs"
        names = [str(place) for place in range(len(self._members)) if place not in heard]
        return f"{'ranks' if len(names) > 1 else 'rank'} {' and '.join(names)} didn't answer"

    def _signal(self, name: str) -> None:
        """To all processes and what they have started, where the system can.

        One that hasn't been waited for keeps the group's number from being given to others.
        """
        number = getattr(signal, name, None)
        if number is not None and any(m.process.returncode is None for m in self._members):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._members[0].process.pid, number)


def interpreter(arguments: Callable[[int, int], Sequence[str]]) -> Start:
    """Starts processes of Python's.

    Args:
        arguments: from the numbers of the pipes of orders and of answers.
    """

    def start(
        environ: Mapping[str, str], pipes: tuple[int, int], log: IO[bytes], group: int | None
    ) -> ArmProcess:
        return subprocess.Popen(
            [sys.executable, *arguments(*pipes)],
            pass_fds=pipes,
            env=environment.child_environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=group or 0,
        )

    return start


def _understood(line: str) -> Answer | str:
    """An answer, or the failure that it tells of."""
    try:
        found: Answer = json.loads(line)
    except ValueError:
        return f"its answer can't be read: {line[:80]!r}"
    if "failed" not in found:
        return found
    # An InputError is a sentence for the user; of other errors the kind says more.
    return str(found["failed"]).removeprefix(f"{InputError.__name__}: ")
