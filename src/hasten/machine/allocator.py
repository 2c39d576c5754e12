"""What the host's memory allocator does with large tensors, and the few ways to change it.

glibc maps every large block anew and gives it back when it is freed, so that each step pays for
the same pages again: the kernel zeroes them at first touch, one fault per 4 KiB. Keeping freed
memory saves the faults (mallopt(3)); huge pages make a fault stand for 2 MiB; tcmalloc and jemalloc
keep memory by themselves, if they are loaded before the process starts.

One limit of glibc before 2.38: a freed aligned block is a little smaller than what the next request
of the same size asks for, so it isn't always found again (sourceware.org bug 14581). Blocks that
lie beside other free ones are.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import platform
import re
from pathlib import Path

import torch

MAPPED_FROM = 2**30  # bytes; smaller blocks come from the heap, which is kept
TRIMMED_FROM = 2**31 - 1  # free bytes at the heap's end before any go back; mallopt takes an int
GROWS_BY = 64 * 2**20  # the heap's spare room, so that it grows seldom
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}  # Debian, Ubuntu
_NAMES = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
_PLACES = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/conda/lib")
BLOCK = 48 * 2**20  # bytes of a test block; glibc by itself maps every one above 32 MiB


def keeping() -> dict[str, str]:
    """Variables under which glibc keeps freed memory, for a process to be started (mallopt(3))."""
    return {
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM),
        "MALLOC_TRIM_THRESHOLD_": str(TRIMMED_FROM),
        "MALLOC_TOP_PAD_": str(GROWS_BY),
    }


def keep() -> bool:
    """The same for this process, from now on; False where the C library isn't glibc or refuses."""
    if not is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    pairs = (
        (_M_MMAP_THRESHOLD, MAPPED_FROM),
        (_M_TRIM_THRESHOLD, TRIMMED_FROM),
        (_M_TOP_PAD, GROWS_BY),
    )
    answers = [mallopt(option, value) for option, value in pairs]  # each is set, whatever before
    return answers == [1, 1, 1]


def is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def library(kind: str) -> str | None:
    """Path of tcmalloc's or jemalloc's shared library on this machine, or its bare name."""
    for name in _NAMES[kind]:
        for place in _PLACES:
            found = sorted(glob.glob(f"{place}/lib{name}.so*"))
            if found:
                return found[0]
        bare = _elsewhere(name)
        if bare:
            return bare
    return None


@functools.cache  # Python asks the compiler and the linker, and a study asks for every plan
def _elsewhere(name: str) -> str | None:
    """Bare name of a library on the loader's path."""
    return ctypes.util.find_library(name)


def is_loaded(name: str) -> bool:
    """Whether this process has a library of that name mapped."""
    return any(name in Path(line.split()[-1]).name for line in _text("/proc/self/maps") if line)


def huge_page_mode(path: str = "/sys/kernel/mm/transparent_hugepage/enabled") -> str:
    """``always``, ``madvise`` or ``never``; ``unknown`` where the kernel doesn't say."""
    chosen = re.search(r"\[(\w+)\]", " ".join(_text(path)))
    return chosen.group(1) if chosen else "unknown"


def minor_faults() -> int:
    """Pages that this process has had filled in by the kernel so far."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_per_block(size: int = BLOCK, times: int = 12) -> int:
    """The fewest page faults of ``times`` tensors of ``size`` bytes, each filled and freed.

    One per 4 KiB if memory goes back each time; next to none once the heap holds enough to keep.
    """
    found = []
    for _ in range(times):
        before = minor_faults()
        torch.empty(size // 4).fill_(1.0)
        found.append(minor_faults() - before)
    return min(found)


def _text(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
