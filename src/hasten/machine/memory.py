"""Memory: a batch size that follows the free memory; allocator settings for large tensors.

``Headroom`` adapts a size (examples or tokens of a batch). The rule has two bounds.
``good`` is the largest size that stayed under the memory threshold, ``ceiling`` the
smallest that exceeded it. Without a ceiling the size grows by a factor. With a ceiling
it grows at most half the way from good to ceiling, and stays once they are 5 % apart. A
ceiling is never removed, so the size can't oscillate around it. With threshold x factor
<= 1 one growth step from below the threshold stays within the memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import math
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from hasten.machine import host, processes

Meter = Callable[[], tuple[float, float]]  # returns (bytes used, total bytes)
REST = 1.05  # ratio of ceiling to good up to which the size stays
FILLED = 0.8  # share of the size that a batch must have for its memory to count for the size


class Headroom:
    """Finds, during training, the largest size with memory below a share of the limit.

    Args:
        meter: returns (bytes used, total bytes); called once after each step.
    """

    def __init__(
        self, size: int, most: int, growth_factor: float, memory_threshold: float, meter: Meter
    ) -> None:
        if not 1 <= size <= most:
            raise ValueError(f"the size starts at {size}; it must lie between 1 and {most}")
        if growth_factor <= 1:
            raise ValueError(f"growth_factor is {growth_factor}; it must be above 1")
        if not 0 < memory_threshold < 1:
            raise ValueError(f"memory_threshold is {memory_threshold}; it must be within 0 and 1")
        self.size, self.most = size, most
        self.growth_factor, self.memory_threshold = growth_factor, memory_threshold
        self.meter = meter
        self.good = 0  # 0: none known
        self.ceiling = 0  # 0: none known
        self.changes = 0

    def reach(self, load: int) -> None:
        """Raises the size to ``load`` if it is smaller."""
        self._move(max(self.size, load))

    def observe(self, load: int) -> None:
        """Measures the memory after a step with a largest batch of the size ``load``."""
        used, limit = self.meter()
        share = used / limit
        if share > self.memory_threshold:
            self._lower(load)
            if self.size >= load:
                self._move(self.good or int(load * min(1 / REST, self.memory_threshold / share)))
        elif load <= self.size and load >= FILLED * self.size:
            self.good = max(self.good, self.size)
            self._move(self._next())

    def on_out_of_memory(self, load: int | None = None) -> None:
        """Lowers the size to half of a batch's size (default: the full size) that didn't fit."""
        load = self.size if load is None else load
        self._lower(load)
        self._move(min(self.size, load // 2))

    def _lower(self, load: int) -> None:
        self.ceiling = min(self.ceiling or load, load)
        if self.good >= self.ceiling:  # the batches measured then needed less memory by chance
            self.good = 0

    def _next(self) -> int:
        larger = max(self.size + 1, int(self.size * self.growth_factor))
        if not self.ceiling:
            return larger
        middle = (self.good + self.ceiling) // 2
        can_grow = self.ceiling > self.good * REST and middle > self.good
        return min(middle, larger) if can_grow else self.size

    def _move(self, size: int) -> None:
        size = max(1, min(size, self.most))
        self.changes += size != self.size
        self.size = size

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size, "good": self.good, "ceiling": self.ceiling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = max(1, min(int(state["size"]), self.most))
        self.good, self.ceiling = int(state["good"]), int(state["ceiling"])


def memory_meter(device: str | torch.device = "cpu") -> Meter:
    """Returns `host_meter` for the processor, else `accelerator_meter`."""
    torch_device = torch.device(device)
    return host_meter() if torch_device.type == "cpu" else accelerator_meter(torch_device)


def accelerator_meter(device: torch.device) -> Meter:
    """Returns a meter of allocated bytes, and of the bytes that this process has or could get."""
    memory = torch.accelerator.memory

    def limit() -> float:
        free, _ = memory.get_memory_info(device)
        return float(free + memory.memory_reserved(device))

    return _peak_meter(
        lambda: memory.max_memory_allocated(device),
        lambda: memory.memory_allocated(device),
        limit,
    )


def device_bytes(device: torch.device | str) -> int:
    """Returns an accelerator's total memory; 0 for a processor or if it isn't reported."""
    torch_device = torch.device(device)
    if torch_device.type in ("cpu", "meta"):
        return 0
    try:
        _, total = torch.accelerator.memory.get_memory_info(torch_device)
    except (RuntimeError, NotImplementedError):
        return 0
    return int(total)


def host_meter() -> Meter:
    """Returns a meter of resident bytes, and of the container's limit or the machine's memory."""
    limit = float(host.usable_memory())
    return _peak_meter(processes.host_memory_peak, processes.resident_bytes, lambda: limit)


def free_bytes(device: torch.device | str) -> float:
    """Returns the bytes that this process could still get on a device; infinite if unreported."""
    torch_device = torch.device(device)
    if torch_device.type == "cpu":
        used, limit = host_meter()()
        return min(float(psutil.virtual_memory().available), limit - used)
    memory = torch.accelerator.memory
    try:
        free_on_device, _ = memory.get_memory_info(torch_device)
        # Free blocks in torch's allocator.
        unused = memory.memory_reserved(torch_device) - memory.memory_allocated(torch_device)
    except (RuntimeError, NotImplementedError):
        return math.inf
    return float(free_on_device + unused)


def _peak_meter(
    peak: Callable[[], int], now: Callable[[], int], limit: Callable[[], float]
) -> Meter:
    """Returns a meter that reads the peak if it rose since the last reading, else the current use.

    It doesn't reset the peak, which other measurements read too.
    """
    before = 0

    def read() -> tuple[float, float]:
        nonlocal before
        rose = peak() > before
        before = max(before, peak())
        return float(before if rose else now()), limit()

    return read


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error means that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text  # the latter: torch on the host
    )


# The host allocator's treatment of large tensors, and the settings that change it.
#
# glibc maps every large block and unmaps it when it is freed. So each step pays for the same pages
# again: the kernel zeroes them at the first access, with one fault per 4 KiB. Keeping freed memory
# avoids the faults (mallopt(3)). With huge pages one fault covers 2 MiB. tcmalloc and jemalloc keep
# memory by default, if they are loaded before the process starts.
#
# A limit of glibc before 2.38: a freed aligned block is slightly smaller than the next request of
# the same size. So it is reused only if it is next to another free block (sourceware.org bug
# 14581).

MAPPED_FROM = 2**30  # bytes from which a block is mapped; smaller ones come from the kept heap
TRIMMED_FROM = 2**31 - 1  # free bytes at the heap's end from which it shrinks; the largest int
RETURNED_FROM = 2**20  # bytes from which a freed block goes back to the system at once
GROWS_BY = 64 * 2**20  # bytes by which the heap grows beyond the request, so it grows rarely
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}  # Debian, Ubuntu
_NAMES = {"tcmalloc": ("tcmalloc_minimal", "tcmalloc"), "jemalloc": ("jemalloc",)}
_LIBRARY_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/conda/lib",
)
BLOCK = 48 * 2**20  # bytes of a tested tensor; by default glibc maps every block above 32 MiB


# Cached, because find_library runs compiler and linker, and a study would call it for every plan.
_on_loaders_path = functools.cache(ctypes.util.find_library)


def keeping() -> dict[str, str]:
    """Returns variables that make glibc keep freed memory, for a new process (mallopt(3))."""
    return {
        "MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM),
        "MALLOC_TRIM_THRESHOLD_": str(TRIMMED_FROM),
        "MALLOC_TOP_PAD_": str(GROWS_BY),
    }


def keep() -> bool:
    """Makes glibc keep freed memory in this process; False if it isn't glibc or refuses."""
    if not is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    pairs = (
        (_M_MMAP_THRESHOLD, MAPPED_FROM),
        (_M_TRIM_THRESHOLD, TRIMMED_FROM),
        (_M_TOP_PAD, GROWS_BY),
    )
    successes = [mallopt(option, value) for option, value in pairs]  # tries all, even if one fails
    return successes == [1, 1, 1]


def return_large_blocks() -> None:
    """Makes glibc map blocks from ``RETURNED_FROM`` on, so that their memory goes back when freed.

    By itself it maps few blocks after the first ones were freed. A heap in which gathered weights
    of many sizes come and go grows to several times of what is in use.
    """
    if is_glibc():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, RETURNED_FROM)


def release_freed() -> None:
    """Returns freed memory to the system; call it where no step follows at once.

    glibc keeps freed blocks below 32 MiB between used ones. The next steps would fill them again,
    with a page fault for each 4 KiB (malloc_trim(3)).
    """
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def library(kind: str) -> str | None:
    """Returns the path of tcmalloc's or jemalloc's library on this machine, or its bare name."""
    for name in _NAMES[kind]:
        for folder in _LIBRARY_FOLDERS:
            matches = sorted(glob.glob(f"{folder}/lib{name}.so*"))
            if matches:
                return matches[0]
        if bare := _on_loaders_path(name):
            return bare
    return None


def huge_page_mode(path: str = "/sys/kernel/mm/transparent_hugepage/enabled") -> str:
    """Returns ``always``, ``madvise`` or ``never``; ``unknown`` if it isn't reported."""
    chosen = re.search(r"\[(\w+)\]", " ".join(_text(path)))
    return chosen.group(1) if chosen else "unknown"


def minor_faults() -> int:
    """Returns the number of pages that the kernel has filled for this process."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_per_block() -> int:
    """Returns the fewest page faults of twelve tensors of ``BLOCK`` bytes, each filled and freed.

    There is one per 4 KiB if freed memory goes back to the kernel, and almost none if it is kept.
    """
    faults = []
    for _ in range(12):
        before = minor_faults()
        torch.empty(BLOCK // 4).fill_(1.0)
        faults.append(minor_faults() - before)
    return min(faults)


def _text(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
