"""Measured ceilings of a machine: rates of matrix products, memory, links and disk.

  1. A probe of side 256 estimates the time of a product.
  2. Squares of growing sides and the shapes of a layer follow, as far as memory and
     time allow. Shapes that don't fit are listed, not estimated.
  3. For each shape: the best and the median of repeated products into the same output.

Values are random: with zeros a chip draws less power and clocks higher than in
training. The best is the ceiling (others call it MAMF, the maximum achievable matmul
FLOPS), because a disturbance only makes a measurement slower.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIDES = (512, 1024, 2048, 4096, 8192)
# (m, n, k): tokens x outputs x inputs of the up and down projections of a small and a 7 B model
LAYERS = ((4096, 1376, 512), (4096, 512, 1376), (4096, 11008, 4096), (4096, 4096, 11008))
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
ON_CPU = ("fp32", "bf16")
CEILING_DTYPES = ("bf16", "fp16", "tf32", "fp32")  # fp8 apart: training in bf16 can't reach it
FEWEST, MOST = 3, 50  # repeats of one shape
SAMPLE_SECONDS = 0.005  # shorter products are timed several at once
COPIED = 1 << 29  # bytes; far more than caches hold
Clock = Callable[[], float]


@dataclass(frozen=True)
class ProductRate:
    """One shape's rate in FLOP/s: (m, k) times (k, n)."""

    dtype: str
    m: int
    n: int
    k: int
    best: float
    median: float
    repeats: int


@dataclass(frozen=True)
class CopyRate:
    """One way of bytes in bytes per second; a copy within memory counts its reads and writes."""

    way: str
    size: int
    best: float
    median: float
    repeats: int


@dataclass(frozen=True)
class MachineRates:
    """Measured rates, with device and date; ``skipped``: what wasn't measured, and why."""

    device: str
    device_name: str
    threads: int
    torch: str
    measured_at: str
    seconds: float
    products: tuple[ProductRate, ...]
    copies: tuple[CopyRate, ...]
    skipped: tuple[str, ...] = ()

    def best(self, dtypes: Sequence[str] = CEILING_DTYPES) -> ProductRate | None:
        """The fastest product in any of these formats."""
        products = [p for p in self.products if p.dtype in dtypes]
        return max(products, key=lambda p: p.best, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hasten machine rates", **asdict(self)}

    @classmethod
    def from_dict(cls, entry: Any) -> MachineRates:
        """Returns the object from the result of ``to_dict``, also after JSON.

        Raises:
            ValueError: it is something else, or was edited into invalid values.
        """
        try:
            values = {k: v for k, v in entry.items() if k != "kind"}
            values["products"] = tuple(ProductRate(**p) for p in values["products"])
            values["copies"] = tuple(CopyRate(**c) for c in values["copies"])
            values["skipped"] = tuple(values["skipped"])
            rates = cls(**values)
            figures = [p.best for p in rates.products] + [c.best for c in rates.copies]
            sound = all(0 < figure < math.inf for figure in figures)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("it doesn't hold what `hasten env --bench -o` writes") from error
        if not sound:
            raise ValueError("a rate in it is not a positive number")
        return rates


def measure(
    device: str = "cpu",
    device_name: str = "",
    dtypes: Sequence[str] | None = None,
    seconds: float = 30.0,
    memory_bytes: int = 1 << 32,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> MachineRates:
    """Measure products and copies in about ``seconds``, using a quarter of the memory at most.

    Raises:
        ValueError: an unknown format, one that the device doesn't have, or no time.
    """
    dtypes = checked_dtypes(device, dtypes)
    if not 0.1 <= seconds <= 3600:
        raise ValueError(f"the time to measure is {seconds} s; give 0.1 to 3600")
    began = time.perf_counter()
    products: list[ProductRate] = []
    copies: list[CopyRate] = []
    skipped: list[str] = []
    for number, dtype in enumerate(dtypes):
        share = 0.8 * number / len(dtypes)
        on_progress(f"products in {dtype}", share)
        until = time.perf_counter() + 0.8 * seconds / len(dtypes)
        products += _products(device, dtype, until, memory_bytes // 4, skipped)
    ways = _ways(device, memory_bytes // 4)
    for number, (way, (size, act)) in enumerate(ways.items()):
        on_progress(way, 0.8 + 0.2 * number / len(ways))
        spent = _samples(act, device, 0.2 * seconds / len(ways), 0.0)
        best, median = min(spent), statistics.median(spent)
        copies.append(CopyRate(way, size, size / best, size / median, len(spent)))
    on_progress("done", 1.0)
    return MachineRates(
        device=device,
        device_name=device_name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - began,
        products=tuple(products),
        copies=tuple(copies),
        skipped=tuple(skipped),
    )


def checked_dtypes(device: str, dtypes: Sequence[str] | None) -> tuple[str, ...]:
    """The formats to measure; all that the device may have where none is named."""
    supported = ON_CPU if device == "cpu" else tuple(DTYPES)
    for name in dtypes or ():
        if name not in DTYPES:
            raise ValueError(f"{name!r} is no number format; give {', '.join(DTYPES)}")
        if name not in supported:
            raise ValueError(f"{name} isn't measured on a processor, only {', '.join(supported)}")
    return tuple(dict.fromkeys(dtypes or supported))


def _products(
    device: str, dtype: str, until: float, memory: int, skipped: list[str]
) -> Iterator[ProductRate]:
    """The rates of one format, small shapes first, each with its part of the time that is left."""
    shapes = sorted([*((s, s, s) for s in SIDES), *LAYERS], key=math.prod)
    try:
        with _precision(dtype):
            act = _product(device, dtype, (256, 256, 256))
            rate = 2 * 256**3 / min(_samples(act, device, 0.05, 0.0))
    except (RuntimeError, NotImplementedError) as error:  # torch's way to say: not on this chip
        skipped.append(f"{dtype}: {str(error).splitlines()[0]:.120}")
        return
    for number, (m, n, k) in enumerate(shapes):
        name = f"{dtype} {m}x{k} by {k}x{n}"
        remaining = until - time.perf_counter()
        expected = 2 * m * n * k / rate
        if (m * k + k * n + m * n) * 4 > memory:
            skipped.append(f"{name}: it takes more than a quarter of the memory")
        elif (FEWEST + 1) * expected > remaining:
            skipped.append(f"{name}: no time")
        else:
            try:
                with _precision(dtype):
                    act = _product(device, dtype, (m, n, k))
                    spent = _samples(act, device, remaining / (len(shapes) - number), expected)
            except torch.OutOfMemoryError:
                skipped.append(f"{name}: out of memory")
                continue
            rate = 2 * m * n * k / min(spent)
            median = 2 * m * n * k / statistics.median(spent)
            yield ProductRate(dtype, m, n, k, rate, median, len(spent))


def _product(device: str, dtype: str, shape: tuple[int, int, int]) -> Callable[[], Any]:
    m, n, k = shape
    kind = DTYPES[dtype]
    a, b = (torch.randn(s, device=device).to(kind) for s in ((m, k), (n, k)))
    if dtype == "fp8":  # needs scales; the second matrix by columns
        one = torch.ones((), device=device)
        out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=out
        )
    out, right = torch.empty(m, n, device=device, dtype=kind), b.t().contiguous()
    return lambda: torch.mm(a, right, out=out)


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """float32 products as they are meant, or on tensor cores for tf32; as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _samples(
    act: Callable[[], Any], device: str, seconds: float, expected: float, clock: Clock | None = None
) -> list[float]:
    """Seconds of each repeat, the first left out; short acts are timed several at once."""
    clock = clock or time.perf_counter
    wait = (lambda: None) if device == "cpu" else partial(torch.accelerator.synchronize, device)
    act()
    wait()
    together = min(math.ceil(SAMPLE_SECONDS / expected), 1000) if expected else 1
    samples: list[float] = []
    until = clock() + seconds
    while len(samples) < FEWEST or (clock() < until and len(samples) < MOST):
        began = clock()
        for _ in range(together):
            act()
        wait()
        samples.append((clock() - began) / together)
    return samples


def _ways(device: str, memory: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Name -> (bytes that move, the act); a copy reads and writes."""
    size = min(COPIED, memory // 2) // 4 * 4
    one, other = (torch.ones(size // 4, device=device) for _ in range(2))
    transfers: dict[str, tuple[int, Callable[[], Any]]] = {
        "read": (size, one.sum),
        "write": (size, lambda: one.fill_(1.0)),
        "copy": (2 * size, lambda: other.copy_(one)),
    }
    if device != "cpu":
        host: Tensor = torch.ones(size // 4, pin_memory=True)
        transfers["host to device"] = (size, lambda: one.copy_(host, non_blocking=True))
        transfers["device to host"] = (size, lambda: host.copy_(one, non_blocking=True))
    return transfers


# How fast a folder's disk writes and reads, measured with a file that is gone afterwards.
#
#   1. write: pieces of random bytes (a file system may compress others), one fsync at the end
#   2. read: the same file, after its pages have been given back to the system (posix_fadvise), in
#      pieces; where they can't be given back the rate would be the memory's, and is None
#   3. flush: many small writes, each with an fsync, as a line that must survive has it
#
# A rate of a few hundred megabytes is that of a burst: a cache in the disk may make it faster than
# a checkpoint of many gigabytes will find it.

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
            pieces = [os.urandom(PIECE) for _ in range(8)]
            began = time.perf_counter()
            for index in range(size // PIECE):
                os.write(handle, pieces[index % len(pieces)])
            os.fsync(handle)
            write = size / (time.perf_counter() - began)
            read = _read(handle, size)
            flushes = []
            for _ in range(FLUSHES):
                began = time.perf_counter()
                os.write(handle, b"x" * 512)
                os.fsync(handle)
                flushes.append(time.perf_counter() - began)
    except OSError as error:
        raise ValueError(
            f"{folder}: its disk can't be measured ({error.strerror or error}); name a folder that "
            f"takes a file of {size >> 20} MiB"
        ) from error
    read_rate = size / read if read else None
    return DiskSpeed(str(folder), size, write, read_rate, statistics.median(flushes))


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
