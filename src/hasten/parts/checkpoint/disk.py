"""The file-system calls of a commit, in one place, so that a test can cut the power between two."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Disk:
    """A local disk. Nothing is durable before ``sync`` of the file and of the folder it is in."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def open_new(self, path: Path) -> int:
        """The descriptor of a file that wasn't there; owner and group may read it."""
        return os.open(path, NEW_FILE, 0o640)

    def write(self, descriptor: int, block: memoryview) -> None:
        """All of the block: the system may take it in pieces."""
        while block:
            block = block[os.write(descriptor, block) :]

    def sync(self, path: Path) -> None:
        """A file's bytes, or a folder's names, survive a loss of power from here on."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        """A folder and all in it; what can't be removed stays without a word."""
        shutil.rmtree(path, ignore_errors=True)
