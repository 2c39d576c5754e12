"""Benchmark of a machine: highest rates of matrix products, memory, links and disk.

  1. A product of side 256 estimates the rate.
  2. Squares of growing sides and the shapes of a layer follow, as far as memory and
     time allow.
  3. For each shape: the best and the median rate of repeated products.

Values are random: with zeros a chip draws less power and clocks higher than in
training. The best rate is the machine's ceiling (also called MAMF, the maximum
achievable matmul FLOPS), because a disturbance only makes a measurement slower.
"""

from __future__ import annotations

import datetime
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

PROBE = (256, 256, 256)
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
CEILING_DTYPES = ("bf16", "fp16", "tf32", "fp32")  # without fp8, which training in bf16 can't reach
FEWEST = 5  # repeats of a product; a shape without time for them is skipped
COPIED = 1 << 29  # bytes of a copied tensor, far more than caches hold


@dataclass(frozen=True)
class Rate:
    """Repeated products (``4096x512 by 512x1376``) in FLOP/s, or copies in bytes/s.

    ``dtype`` is the format of a product. A copy within memory counts its reads and writes.
    """

    what: str
    dtype: str
    best: float
    median: float
    repeats: int


@dataclass(frozen=True)
class MachineRates:
    """Measured rates, with device and date."""

    device: str
    device_name: str
    threads: int
    torch: str
    measured_at: str
    seconds: float
    products: tuple[Rate, ...]
    copies: tuple[Rate, ...]

    def best(self, dtypes: Sequence[str] = CEILING_DTYPES) -> Rate | None:
        """Returns the fastest product in any of these formats."""
        products = [p for p in self.products if p.dtype in dtypes]
        return max(products, key=lambda p: p.best, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hasten machine rates", **asdict(self)}

    @classmethod
    def from_dict(cls, entry: Any) -> MachineRates:
        """Returns the object from the result of ``to_dict``, also after JSON.

        Raises:
            ValueError: ``entry`` isn't a result of ``to_dict``.
        """
        try:
            values = {key: entry[key] for key in entry if key != "kind"}
            for name in ("products", "copies"):
                values[name] = tuple(Rate(**rate) for rate in values[name])
            return cls(**values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("it doesn't hold what `hasten env --bench -o` writes") from error


def measure(
    device: str = "cpu",
    device_name: str = "",
    dtypes: Sequence[str] | None = None,
    seconds: float = 30.0,
    memory_bytes: int = 1 << 32,
    on_progress: Callable[[str, float], None] = lambda what, share: None,
) -> MachineRates:
    """Measures products and copies in about ``seconds``, in at most a quarter of the memory."""
    dtypes = dtypes or (ON_CPU if device == "cpu" else tuple(DTYPES))
    began = time.perf_counter()
    products: list[Rate] = []
    copies: list[Rate] = []
    precision = torch.get_float32_matmul_precision()
    for number, dtype in enumerate(dtypes):
        on_progress(f"products in {dtype}", 0.8 * number / len(dtypes))
        until = time.perf_counter() + 0.8 * seconds / len(dtypes)
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            products += _products(device, dtype, until, memory_bytes // 4)
        finally:
            torch.set_float32_matmul_precision(precision)
    transfers = _transfers(device, memory_bytes // 4)
    for number, (name, (size, function)) in enumerate(transfers.items()):
        on_progress(name, 0.8 + 0.2 * number / len(transfers))
        copies.append(_rate(name, "", size, function, device, 0.2 * seconds / len(transfers)))
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
    )


def _products(device: str, dtype: str, until: float, memory: int) -> Iterator[Rate]:
    """Yields rates of one format, small shapes first; the time until ``until`` is divided."""
    shapes = [PROBE, *sorted([*((s, s, s) for s in SIDES), *LAYERS], key=math.prod)]
    rate = math.inf
    for number, (m, n, k) in enumerate(shapes):
        remaining, flops = until - time.perf_counter(), 2 * m * n * k
        if (m * k + k * n + m * n) * 4 > memory or FEWEST * flops / rate > remaining:
            continue
        seconds = remaining / (len(shapes) - number)
        try:
            function = _product(device, dtype, (m, n, k))
            product = _rate(f"{m}x{k} by {k}x{n}", dtype, flops, function, device, seconds)
        except (RuntimeError, NotImplementedError):  # not on this chip, or no memory
            return
        rate = product.best
        if number:
            yield product


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


def _rate(
    what: str, dtype: str, amount: int, function: Callable[[], Any], device: str, seconds: float
) -> Rate:
    """Returns the best and median rate of ``function``, which does ``amount`` of work per call."""

    def clock() -> float:
        if device != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    timer = Timer(
        "act()", globals={"act": function}, timer=clock, num_threads=torch.get_num_threads()
    )
    spent = timer.blocked_autorange(min_run_time=seconds).times
    return Rate(what, dtype, amount / min(spent), amount / statistics.median(spent), len(spent))


def _transfers(device: str, memory_bytes: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Returns (moved bytes, function) by name; a copy counts reads and writes."""
    size = min(COPIED, memory_bytes // 2) // 4 * 4
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


PIECE = 1 << 20  # bytes of a write or read of the disk
FLUSHES = 16  # number of small writes that are timed


@dataclass(frozen=True)
class DiskSpeed:
    """Rates in bytes per second, and the median seconds of a small write that reaches the disk.

    The rates are those of a burst. A checkpoint of many gigabytes may be slower. ``read`` is
    None on a system without direct reads, where the cache in memory would be measured.
    """

    path: str
    bytes: int
    write: float
    read: float | None
    flush_seconds: float


def measure_disk(folder: Path, size: int = 64 << 20) -> DiskSpeed:
    """Writes and reads ``size`` random bytes, which can't be compressed, and times small writes.

    Raises:
        ValueError: the folder doesn't exist, can't be written, or has no room.
    """
    pieces = [os.urandom(PIECE) for _ in range(8)]
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hasten-", buffering=0) as file:
            began = time.perf_counter()
            for index in range(size // PIECE):
                file.write(pieces[index % len(pieces)])
            os.fsync(file.fileno())
            write = size / (time.perf_counter() - began)
            read_seconds = _read(file.name)
            flushes = []
            for _ in range(FLUSHES):
                began = time.perf_counter()
                file.write(b"x" * 512)
                os.fsync(file.fileno())
                flushes.append(time.perf_counter() - began)
    except OSError as error:
        raise ValueError(
            f"{folder}: its disk can't be measured ({error.strerror or error}); name a folder that "
            f"takes a file of {size >> 20} MiB"
        ) from error
    read = size / read_seconds if read_seconds else None
    return DiskSpeed(str(folder), size, write, read, statistics.median(flushes))


def _read(path: str) -> float | None:
    """Returns the seconds of reading a file without the system's cache (O_DIRECT), or None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None
    with open(handle, "rb", buffering=0) as file, mmap.mmap(-1, PIECE) as piece:
        began = time.perf_counter()
        while file.readinto(piece):
            pass
        return time.perf_counter() - began
