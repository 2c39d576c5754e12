"""One writer at a time, by a lock on a file; and files that are replaced whole or not at all.

Who prepares data holds the lock, and others wait; who trains refuses others. The lock is the
kernel's (flock), bound to an open file, so it is gone the moment its process is dead, however it
died. The file beside the data carries the holder's process id and start for the message alone; a
file that lies there without its lock blocks nobody. The holder removes it while it still has the
lock, so a waiter may find itself with the lock of a file that has lost its name: it then begins
again (the check of the inode).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.machine import environment

# What a file system without locks answers. Writing is atomic without them too, only done twice.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
RUN_LOCK = "run.lock"
_POLL_SECONDS = 0.2  # between two looks whether another measurement has ended
_TRIES, _PAUSE_SECONDS = 20, 0.025  # before a lock counts as another run's
_HELD: set[int] = set()  # handles of this process
_measuring = False  # whether this process has the machine's lock
_LOG = logging.getLogger(__name__)


@contextmanager
def one_writer(path: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold the lock file `path` for as long as the context lasts; may raise OSError.

    Windows has no such locks: there everybody writes, and the last one's file stays.
    """
    told = False

    def wait(handle: int) -> None:
        nonlocal told
        if not told:
            tell(f"waiting for {_holder(_note(handle))}, which prepares the same data")
            told = True
        _lock(handle, wait=True)

    with _holding(path, wait):
        yield


@contextmanager
def only_run_in(folder: Path, start: str = "", leads: bool = True) -> Iterator[None]:
    """Hold a run's folder for as long as the context lasts, at once or not at all.

    `start` is known to all ranks of one start and to no others. A rank that doesn't lead holds
    nothing: it is refused as its leader is, where a run of another start has the folder.

    Raises:
        InputError: another run writes into it, or it can't be written.
    """
    path = folder / RUN_LOCK

    def refuse(handle: int) -> None:
        for _ in range(_TRIES):  # a rank may be looking, or a killed run be on its way out
            time.sleep(_PAUSE_SECONDS)
            if _lock(handle, wait=False):
                return
        raise InputError(
            f"output: {folder} is in use by {_holder(_note(handle))}, which trains in it; wait "
            "until that run has ended, or choose another output"
        )

    with ExitStack() as held:
        try:
            if leads:
                held.enter_context(_holding(path, refuse, start))
            elif _is_of_others(path, start):
                raise InputError(f"output: {folder} is in use by another run; choose another")
        except OSError as error:
            raise InputError(
                f"output: {path} can't be locked: {error.strerror or error}; remove it, or choose "
                "another output"
            ) from error
        yield


def _is_of_others(path: Path, start: str) -> bool:
    """Whether the lock is held, and its holder's note goes on naming another start."""
    if sys.platform == "win32":
        return False
    for _ in range(_TRIES):  # the leader may have the lock and not yet its note in it
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if _lock(handle, wait=False, shared=True) or _note(handle).get("start") == start:
                return False
        finally:
            os.close(handle)
        time.sleep(_PAUSE_SECONDS)
    return True


@contextmanager
def _holding(path: Path, busy: Callable[[int], None], start: str = "") -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    handle = _locked(path, busy)
    _HELD.add(handle)
    try:
        note = {"pid": os.getpid(), "host": socket.gethostname(), "start": start}
        note["since"] = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(note).encode(), 0)
        yield
    finally:
        if handle in _HELD:  # else this is a forked child, and the lock is its parent's
            _HELD.discard(handle)
            path.unlink(missing_ok=True)
            os.close(handle)


@contextmanager
def alone_in(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder of an experiment: two at once would disturb each other and mix their lines.

    Raises:
        InputError: it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder / "lock", tell):
            yield
    except OSError as error:
        raise InputError(
            f"output: can't write into {folder}: {error.strerror or error}; choose another folder"
        ) from error


@contextmanager
def one_measurement(
    tell: Callable[[str], None], budget_seconds: float | None = None
) -> Iterator[None]:
    """Measure alone on this machine: what other processes of this user measure is waited for.

    Two measurements at once would disturb each other. Within one process they may be nested. Where
    no lock can be had, nobody waits; the background load that is measured still shows the other.

    Args:
        tell: is told that and for whom this process waits.
        budget_seconds: how long it waits at most.

    Raises:
        InputError: the other one hasn't ended within the budget.
    """
    global _measuring
    if _measuring:
        yield
        return
    end = None if budget_seconds is None else time.monotonic() + budget_seconds

    def wait(handle: int) -> None:
        other = f"{_holder(_note(handle))}, which measures on this machine"
        tell(f"waiting for {other}")
        while not _lock(handle, wait=False):
            if end is not None and time.monotonic() > end:
                raise InputError(f"budget: waiting for {other} took all of it; start again")
            time.sleep(_POLL_SECONDS)

    with ExitStack() as held:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = (
            Path(environment.variable("XDG_RUNTIME_DIR") or tempfile.gettempdir())
            / f"hasten-{user}"
        )
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(_holding(folder / "measuring.lock", wait))
        except OSError as error:
            _LOG.debug("no lock for measurements in %s: %s", folder, error)
        _measuring = True
        try:
            yield
        finally:
            _measuring = False


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` if nobody has it, without waiting; tells whether it is held.

    Where there are no locks it can't be known, so the answer is no.
    """
    if sys.platform == "win32":
        yield False
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        held = _surely(handle) and _same(handle, path)
        try:
            yield held
        finally:
            if held:
                path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _locked(path: Path, busy: Callable[[int], None]) -> int:
    """The handle of the lock file, locked and still under its name.

    `busy` is called with it where somebody else has the lock; it waits for the lock, or raises.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if not _lock(handle, wait=False):
                busy(handle)
            if _same(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, wait: bool, shared: bool = False) -> bool:
    """Whether the lock is ours; in a file system without locks it always is."""
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(handle, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _surely(handle: int) -> bool:
    """Whether the lock is ours, and not merely not to be had."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _note(handle: int) -> dict[str, Any]:
    """What the holder wrote of itself; empty where it hasn't yet."""
    try:
        note = json.loads(os.pread(handle, 1 << 12, 0))
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}


def _holder(note: dict[str, Any]) -> str:
    if "pid" not in note or "since" not in note:
        return "another process"
    return f"process {note['pid']} (since {note['since']}, on {note.get('host')})"


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    """A forked child (a data worker) would keep the lock after its parent's death."""
    for handle in _HELD:
        os.close(handle)
    _HELD.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)


# Files that are replaced whole or not at all.


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all: under another name, forced to the disk, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
