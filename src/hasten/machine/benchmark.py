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
CEILING_DTYPES = ("bf16", "fp16", "tf32", "fp32")  # fp8 apart: training in bf16 can't reach it
FEWEST, MOST = 3, 50  # repeats of one shape
SAMPLE_SECONDS = 0.005  # shorter products are timed several at once
COPIED = 1 << 29  # bytes; far more than caches hold


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
    """Rate of one kind of copy in bytes/s; a copy within memory counts its reads and writes."""

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
            ValueError: it is something else.
        """
        try:
            values = {key: value for key, value in entry.items() if key != "kind"}
            values["products"] = tuple(ProductRate(**p) for p in values["products"])
            values["copies"] = tuple(CopyRate(**c) for c in values["copies"])
            values["skipped"] = tuple(values["skipped"])
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
    """Measure products and copies in about ``seconds``, using a quarter of the memory at most."""
    dtypes = dtypes or (ON_CPU if device == "cpu" else tuple(DTYPES))
    began = time.perf_counter()
    products: list[ProductRate] = []
    copies: list[CopyRate] = []
    skipped: list[str] = []
    for number, dtype in enumerate(dtypes):
        on_progress(f"products in {dtype}", 0.8 * number / len(dtypes))
        until = time.perf_counter() + 0.8 * seconds / len(dtypes)
        products += _products(device, dtype, until, memory_bytes // 4, skipped)
    transfers = _transfers(device, memory_bytes // 4)
    for number, (name, (size, act)) in enumerate(transfers.items()):
        on_progress(name, 0.8 + 0.2 * number / len(transfers))
        spent = _samples(act, device, 0.2 * seconds / len(transfers))
        copies.append(CopyRate(name, size, *_rates(size, spent)))
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


def _products(
    device: str, dtype: str, until: float, memory: int, skipped: list[str]
) -> Iterator[ProductRate]:
    """The rates of one format, small shapes first, each with its part of the time that is left."""
    shapes = [PROBE, *sorted([*((s, s, s) for s in SIDES), *LAYERS], key=math.prod)]
    rate = math.inf
    for number, (m, n, k) in enumerate(shapes):
        name = f"{dtype} {m}x{k} by {k}x{n}"
        remaining = until - time.perf_counter()
        if (m * k + k * n + m * n) * 4 > memory:
            skipped.append(f"{name}: it takes more than a quarter of the memory")
        elif (FEWEST + 2) * 2 * m * n * k / rate > remaining:
            skipped.append(f"{name}: no time")
        else:
            try:
                with _precision(dtype):
                    act = _product(device, dtype, (m, n, k))
                    spent = _samples(act, device, remaining / (len(shapes) - number))
            except (RuntimeError, NotImplementedError) as error:  # not on this chip, or no memory
                skipped.append(f"{name}: {str(error).splitlines()[0]:.120}")
                return
            product = ProductRate(dtype, m, n, k, *_rates(2 * m * n * k, spent))
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
    act: Callable[[], Any],
    device: str,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each repeat, the first two left out; short acts are timed several at once."""

    def timed(count: int) -> float:
        began = clock()
        for _ in range(count):
            act()
        if device != "cpu":
            torch.accelerator.synchronize(device)
        return (clock() - began) / count

    timed(1)
    together = min(math.ceil(SAMPLE_SECONDS / max(timed(1), 1e-9)), 1000)
    samples: list[float] = []
    until = clock() + seconds
    while len(samples) < FEWEST or (clock() < until and len(samples) < MOST):
        samples.append(timed(together))
    return samples


def _rates(amount: int, spent: Sequence[float]) -> tuple[float, float, int]:
    """Best and median rate of an amount, and the number of repeats."""
    return amount / min(spent), amount / statistics.median(spent), len(spent)


def _transfers(device: str, memory: int) -> dict[str, tuple[int, Callable[[], Any]]]:
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


PIECE = 1 << 20
FLUSHES = 16


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second, and the median seconds of a small write that reaches the disk.

    The rates are those of a burst, and a checkpoint of many gigabytes may be slower.

    On a system without direct reads ``read`` is None, because the rate would be the memory's.
    """

    path: str
    bytes: int
    write: float
    read: float | None
    flush_seconds: float


def measure_disk(folder: Path, size: int = 64 << 20) -> DiskSpeed:
    """Write, read and flush ``size`` random bytes (a file system may compress others) there.

    Raises:
        ValueError: the folder is not there, can't be written, or has no room.
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
    """Seconds of reading the file past the system's memory (O_DIRECT); None if it can't be."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None
    with open(handle, "rb", buffering=0) as file, mmap.mmap(-1, PIECE) as piece:
        began = time.perf_counter()
        while file.readinto(piece):
            pass
        return time.perf_counter() - began
