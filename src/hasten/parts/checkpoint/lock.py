"""A folder that one process at a time may write into.

The lock is ``flock`` on the folder itself: it leaves no file behind and ends with the process, so
that a killed one is in nobody's way. It holds between processes of one machine, and over NFS where
the server knows locks; where it doesn't, nothing is locked and nothing is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path


class FolderInUseError(ValueError):
    """Another process, or another checkpointer of this one, writes into the folder."""


class FolderLock:
    """The right to write into a folder, from ``acquire`` to ``release``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        _LOCKS.add(self)

    @property
    def held(self) -> bool:
        """Whether the right is ours."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the right, at once; a second call by the holder changes nothing.

        Raises:
            FolderInUseError: somebody else has it.
            OSError: the folder isn't there or can't be read.
        """
        if self._descriptor is not None:
            return
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise FolderInUseError(
                    f"{self._folder} is in use by another run; give this one a folder of its own, "
                    "or end the other first"
                ) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the right back; without it nothing happens."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # whoever was forked has the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: close its descriptor, and leave the lock to the parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.release()


_LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data worker) would keep the folder locked after its parent's death."""
    for lock in list(_LOCKS):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)
