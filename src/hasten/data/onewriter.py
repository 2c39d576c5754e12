"""One writer at a time: whoever prepares data holds a lock, everybody else waits and says for whom.

The lock is the kernel's (flock), bound to an open file, so it is gone the moment its process is
dead, however it died. The file beside the data carries the holder's process id and start for the
message alone; a file that lies there without its lock blocks nobody. The holder removes it while it
still has the lock, so a waiter may find itself with the lock of a file that has lost its name: it
then begins again (the check of the inode).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.errors import InputError

# What a file system without locks answers. Writing is atomic without them too, only done twice.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def one_writer(path: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Hold the lock file `path` for as long as the context lasts; may raise OSError.

    Windows has no such locks: there everybody writes, and the last one's file stays.
    """
    if sys.platform == "win32":
        yield
        return
    handle = _locked(path, tell)
    try:
        note = json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        os.ftruncate(handle, 0)
        os.pwrite(handle, note.encode(), 0)
        yield
    finally:
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


def _locked(path: Path, tell: Callable[[str], None]) -> int:
    """The handle of the lock file, locked and still under its name."""
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(handle, wait=False):
                if not told:
                    tell(f"waiting for {_holder(handle)}, which prepares the same data")
                    told = True
                _lock(handle, wait=True)
            if _same(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, wait: bool) -> bool:
    """Whether the lock is ours; in a file system without locks it always is."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
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


def _holder(handle: int) -> str:
    try:
        note = json.loads(os.pread(handle, 1 << 10, 0))
        return f"process {note['pid']} (since {note['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"  # it has the lock and hasn't written its name yet


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
