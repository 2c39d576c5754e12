"""A disk of a few megabytes that can really be full: a tmpfs in a mount namespace of this process.

It is there for this process and its children alone, and gone with the last of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from netlab import network

BLOCK = bytes(1 << 16)
FILLER = "filler"


def mount_small_disk(place: Path, size: int) -> None:
    """Put a disk of ``size`` bytes in the place of a folder, for a process with a single thread.

    Raises:
        OSError: neither the machine's namespaces nor the user's own may be left here.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        network.unshare(network.NEW_MOUNTS)
    except OSError:
        network.unshare(network.NEW_USER | network.NEW_MOUNTS)
        network.become_root_of_own_users(user, group)
    options = f"size={size}".encode()
    nothing, below = ctypes.c_ulong(0), ctypes.c_ulong(network.PRIVATE_AND_BELOW)
    network._call("mount", None, b"/", None, below, None)
    network._call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", nothing, options)


def fill(place: Path, leave: int) -> None:
    """Take all room but ``leave`` bytes, as another program's file does."""
    with (place / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(BLOCK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        os.ftruncate(file.fileno(), max(0, file.tell() - leave))


def make_room(place: Path) -> None:
    """Take the filler away."""
    with contextlib.suppress(FileNotFoundError):
        (place / FILLER).unlink()
