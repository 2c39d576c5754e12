"""How fast a folder's disk writes and reads, measured with a file that is gone afterwards.

  1. write: pieces of random bytes (a file system may compress others), one fsync at the end
  2. read: the same file, after its pages have been given back to the system (posix_fadvise), in
     pieces; where they can't be given back the rate would be the memory's, and is None
  3. flush: many small writes, each with an fsync, as a line that must survive has it

A rate of a few hundred megabytes is that of a burst: a cache in the disk may make it faster than a
checkpoint of many gigabytes will find it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PIECE = 1 << 20
FLUSHES = 16
RESIDENT_SHARE = 0.05  # of the file still in memory: then the disk was hardly read


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second, and the median seconds of a small write that reaches the disk."""

    path: str
    bytes: int
    write: float
    read: float | None
    flush_seconds: float


def measure_disk(folder: Path, size: int = 64 << 20) -> DiskSpeed:
    """Write, read and flush ``size`` bytes in the folder.

    Raises:
        ValueError: the folder is not there, can't be written, or has no room.
    """
    size = max(PIECE, size // PIECE * PIECE)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hasten-", buffering=0) as file:
            handle = file.fileno()
            write = size / _write(handle, size)
            read = _read(handle, size)
            flush = statistics.median(_flush(handle) for _ in range(FLUSHES))
    except OSError as error:
        raise ValueError(
            f"{folder}: its disk can't be measured ({error.strerror or error}); name a folder that "
            f"takes a file of {size >> 20} MiB"
        ) from error
    return DiskSpeed(str(folder), size, write, size / read if read else None, flush)


def _write(handle: int, size: int) -> float:
    pieces = [os.urandom(PIECE) for _ in range(8)]
    began = time.perf_counter()
    for index in range(size // PIECE):
        os.write(handle, pieces[index % len(pieces)])
    os.fsync(handle)
    return time.perf_counter() - began


def _read(handle: int, size: int) -> float | None:
    """Seconds, or None where the system keeps the file in memory."""
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    if _resident(handle, size) > RESIDENT_SHARE:
        return None
    began = time.perf_counter()
    for offset in range(0, size, PIECE):
        os.pread(handle, PIECE, offset)
    return time.perf_counter() - began


def _resident(handle: int, size: int) -> float:
    """Which share of the file's pages is in memory (mincore(2)); 1 where that can't be asked."""
    import ctypes
    import mmap

    try:
        library = ctypes.CDLL(None, use_errno=True)
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_COPY)  # looked at, never written
    except (OSError, ValueError):
        return 1.0
    with mapped:
        pages = -(-size // mmap.PAGESIZE)
        marks = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        wrong = library.mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), marks
        )
        del start  # the map can't be closed while somebody points into it
    return 1.0 if wrong else sum(mark & 1 for mark in marks) / pages


def _flush(handle: int) -> float:
    began = time.perf_counter()
    os.write(handle, b"x" * 512)
    os.fsync(handle)
    return time.perf_counter() - began
