"""Lock files for one process at a time; a lock ends at once if its holder dies.

While a process prepares data, other processes wait for its lock. While a process trains,
others are refused. The lock is the kernel's, taken by `filelock`, which also removes it
from a forked child. The file's content, process id and start of the holder, is used for
messages and to recognise ranks of one start. A lock file without a lock blocks no
process. The holder removes the file while it still has the lock.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.machine import environment

# Errors of a file system without locks. Two processes may then do the same work; their writes are
# atomic all the same.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
RUN_LOCK = "run.lock"
LARGEST_NOTE = 4096  # bytes of a lock file that are read at most
_POLL_SECONDS = 0.05
_TRIES, _PAUSE_SECONDS = 20, 0.025  # tries before a lock counts as another run's
_measuring = False  # True if this process has the machine's lock
_LOG = logging.getLogger(__name__)


class LockedError(Exception):
    """Another process, or another user of the file in this one, has the lock."""


class HeldLock:
    """The lock file `path`, locked until `close`; `exists` is False without locks.

    Args:
        path: created if it doesn't exist; its folder must exist.
        seconds: longest wait for the lock; None: without a limit.
        start: stored for processes that read the lock file.

    Raises:
        LockedError: another process has the lock.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, seconds: float | None = 0.0, start: str = "") -> None:
        import filelock

        self._path = path
        with suppress(FileNotFoundError):
            if path.lstat().st_nlink > 1:  # another file; its content must stay
                raise OSError(errno.EMLINK, "it is another file's second name", str(path))
        lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=-1 if seconds is None else seconds, poll_interval=_POLL_SECONDS)
        except filelock.Timeout as error:
            raise LockedError from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            path.unlink(missing_ok=True)  # created by filelock
        self._lock, self.exists = lock, lock.is_locked
        if self.exists:
            note = {"pid": os.getpid(), "host": socket.gethostname(), "start": start}
            path.write_text(json.dumps({**note, "since": time.strftime("%Y-%m-%d %H:%M:%S")}))

    def close(self) -> None:
        """Releases the lock; no effect in a forked child, which doesn't have it."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()


def _note(path: Path) -> dict[str, Any]:
    """Returns the content of a lock file; empty if the holder hasn't written yet."""
    with suppress(InputError):
        return read_json_object(path, "lock", LARGEST_NOTE)
    return {}


def _holder(path: Path) -> str:
    note = _note(path)
    if "pid" not in note or "since" not in note:
        return "another process"
    return f"process {note['pid']} (since {note['since']}, on {note.get('host')})"


@contextmanager
def one_writer(path: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Holds the lock file `path` inside; may raise OSError."""
    try:
        lock = HeldLock(path)
    except LockedError:
        tell(f"waiting for {_holder(path)}, which prepares the same data")
        lock = HeldLock(path, None)
    with closing(lock):
        yield


@contextmanager
def only_run_in(folder: Path, start: str = "", leads: bool = True) -> Iterator[None]:
    """Context that locks a run's folder, without waiting.

    `start` identifies one start of the run's ranks. A rank with ``leads`` False takes no lock;
    it is refused, as its leader is, if ranks of another start use the folder.

    Raises:
        InputError: another run uses the folder, or the folder can't be written.
    """
    path, lock = folder / RUN_LOCK, None
    try:
        if leads:  # a rank may be reading it, or a killed run may be ending
            lock = HeldLock(path, _TRIES * _PAUSE_SECONDS, start)
        elif _is_used_by_other_start(path, start):
            raise InputError(f"output: {folder} is in use by another run; choose another")
    except LockedError:
        raise InputError(
            f"output: {folder} is in use by {_holder(path)}, which trains in it; wait until that "
            "run has ended, or choose another output"
        ) from None
    except OSError as error:
        raise InputError(
            f"output: {path} can't be locked: {error.strerror or error}; remove it, or choose "
            "another output"
        ) from error
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _is_used_by_other_start(path: Path, start: str) -> bool:
    """Returns True if the lock stays taken by a process of another start."""
    for _ in range(_TRIES):  # the leader may have the lock without its note yet
        if not path.exists():
            return False
        try:
            HeldLock(path).close()
            return False
        except LockedError:
            if _note(path).get("start") == start:
                return False
        time.sleep(_PAUSE_SECONDS)
    return True


@contextmanager
def alone_in(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Context that locks an experiment's folder: two experiments would mix lines in its files.

    Raises:
        InputError: the folder can't be written.
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
    """Context with the lock for measurements on this machine; waits for others of this user.

    Two measurements at once would disturb each other. Within one process the contexts may be
    nested. If no lock is available, the process doesn't wait. The measured background load
    still shows the other measurement.

    Args:
        ``tell``: receives a message with the process that this one waits for.
        budget_seconds: longest wait.

    Raises:
        InputError: the other measurement hasn't ended within the budget.
    """
    global _measuring
    if _measuring:
        yield
        return
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(environment.variable("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path, lock = folder / f"hasten-{user}" / "measuring.lock", None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = HeldLock(path)
        except LockedError:
            other = f"{_holder(path)}, which measures on this machine"
            tell(f"waiting for {other}")
            try:
                lock = HeldLock(path, budget_seconds)
            except LockedError:
                message = f"budget: waiting for {other} took all of it; start again"
                raise InputError(message) from None
    except OSError as error:
        _LOG.debug("no lock for measurements in %s: %s", path.parent, error)
    _measuring = True
    try:
        yield
    finally:
        _measuring = False
        if lock is not None:
            lock.close()


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Locks the file `path` without waiting; yields False if another process may have the lock."""
    try:
        lock = HeldLock(path)
    except LockedError:
        yield False
        return
    with closing(lock):
        yield lock.exists
