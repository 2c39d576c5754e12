"""A pool of processes that tokenise chunks, in any order, each chunk into a file of its own.

The caller's process hands chunks out and collects answers; it never waits for a worker that has
nothing to do. A worker that dies is replaced and its chunk done again: each chunk is a file of its
own, so that the order stays. A chunk that fails, or whose worker dies twice, ends the pool with one
sentence that names it. However the pool ends, interrupts included, its processes end with it; they
are in sessions of their own, so that Ctrl-C reaches the caller alone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from hasten.data import renderer
from hasten.data.worker import Chunk, Work, write_part
from hasten.errors import InputError


class Task(NamedTuple):
    """One chunk to do: `load` reads it only when a worker is free for it."""

    name: str  # as an error names it
    records: int
    load: Callable[[], Chunk]


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    link: Connection


class _DiedError(Exception):
    """A worker's process is gone; says how."""


def run(work: Work, tasks: Iterable[Task], workers: int) -> Generator[int, None, None]:
    """Do all tasks, in this process if `workers` is 1; yields each one's records as it is done.

    Raises InputError where a chunk fails or its workers die. Files of finished chunks stay.
    """
    if workers == 1 or os.name != "posix":
        try:
            for task in tasks:
                try:
                    write_part(work, task.load())
                except (InputError, OSError):
                    raise
                except Exception as error:
                    raise _failed(task, f"{type(error).__name__}: {error}") from error
                yield task.records
        finally:
            renderer.stop()
        return
    left, given = iter(tasks), pickle.dumps(work)
    with ExitStack() as stack:
        idle = [stack.enter_context(_started()) for _ in range(workers)]
        _tell_all(idle, given)
        busy: dict[Connection, tuple[_Worker, Task]] = {}
        once_more: set[str] = set()  # chunks whose worker has died
        while True:
            for task in islice(left, len(idle)):
                worker = idle.pop()
                busy[worker.link] = worker, task
                with suppress(ConnectionError):  # dead: there will be no answer
                    worker.link.send(task.load())
            if not busy:
                return
            for link in wait(list(busy)):
                assert isinstance(link, Connection)
                worker, task = busy.pop(link)
                try:
                    _check_answer(worker, task)
                except _DiedError as how:
                    if task.name in once_more:
                        raise _died(task, str(how)) from None
                    once_more.add(task.name)
                    left = chain([task], left)
                    idle.append(stack.enter_context(_started()))
                    _tell_all(idle[-1:], given)
                    continue
                idle.append(worker)
                yield task.records


def _tell_all(workers: Iterable[_Worker], work: bytes) -> None:
    """Give all their work once all are on their way, so that they load their libraries together."""
    for worker in workers:
        with suppress(ConnectionError):  # dead already: its first chunk says so
            worker.link.send_bytes(work)


def _check_answer(worker: _Worker, task: Task) -> None:
    try:
        answer = worker.link.recv()
    except (EOFError, OSError):
        code = worker.process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise _DiedError(how) from None
    if answer is not None:
        users, what = answer
        raise InputError(what) if users else _failed(task, what)


def _failed(task: Task, what: str) -> InputError:
    return InputError(f"{task.name} can't be tokenised: {what}")


def _died(task: Task, how: str) -> InputError:
    return InputError(
        f"the process that tokenised {task.name} {how}, as the one before it did; if memory ran "
        "out, set data_workers lower, then start again: what is done is kept"
    )


@contextmanager
def _started() -> Iterator[_Worker]:
    """A worker, killed, if need be, when the context ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "hasten.data.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    link = Connection(ours.detach())
    try:
        yield _Worker(process, link)
    finally:
        link.close()
        # It has nothing to lose: parts appear whole or not at all. Its renderer ends with it.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
