"""Ways to compute the same thing, proven against float64 and timed against each other on a machine.

A kernel registers itself as one way of an operation, beside torch's way that it takes the place of:

  1. proof: every way computes one small input; its largest error must lie within its bound
  2. time: rounds in which the ways take turns, on shapes that no round before had, since a library
     that compiles a kernel for every shape it meets is slower in training than its products say
  3. a result is kept in a file, for this device, the versions and the sources of the kernels

On a processor all runs on one thread, and its seconds are those that this thread worked: time in
which others had its core doesn't count. With several threads that wait for each other the same
measurement took 2 to 18 s on a busy machine.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.machine import host

FOLDER = Path("~/.cache/hasten/measured")
SOURCES = ("machine/ways.py", "parts/kernels", "parts/nn")  # what a kept result depends on
PROOF_SIZE = 0.07  # of a round's input
SMALL = 0.125  # of a round's input: tells how long a round takes, and which way is hopeless
HOPELESS = 6.0  # times slower than the first way in the small pass: it isn't timed further
FEWEST, MOST = 6, 12  # rounds; the interval of the sign test needs six
DOUBT = 0.05
Inputs = tuple[Any, ...]  # tensors, and what describes them
Seconds = Callable[[Callable[[], Any]], float]
_LOG = logging.getLogger(__name__)


def _runs(device: str) -> str:
    return ""


@dataclass(frozen=True)
class Operation:
    """What several ways compute.

    Args:
        name: as people read it in a table.
        unit: what ``work`` counts: FLOP or byte.
        draw: inputs in float32, from a share of the largest size, the number of the round (each has
            other shapes) and a generator.
        formula: the results by their definition, from inputs in float64.
        work: of such inputs.
        seconds: of work on all rounds together.
    """

    name: str
    unit: str
    draw: Callable[[float, int, torch.Generator], Inputs]
    formula: Callable[..., tuple[Tensor, ...]]
    work: Callable[..., float]
    seconds: float = 0.08


@dataclass(frozen=True)
class KernelWay:
    """One way to compute an operation, and how far its results may lie from float64's.

    Args:
        run: from inputs in ``dtype`` to the results of the operation's formula; the inputs are its
            own and may be overwritten.
        bound: the largest error, over the sum of a number's size and the root mean square of all.
        own: a kernel of hasten's, not torch's.
        why_not: why it doesn't run on a device, in words; empty where it does.
    """

    operation: Operation
    name: str
    dtype: torch.dtype
    run: Callable[..., tuple[Tensor, ...]]
    bound: float
    own: bool = True
    why_not: Callable[[str], str] = _runs

    @property
    def key(self) -> str:
        return f"{self.operation.name}: {self.name}"


_REGISTERED: dict[str, KernelWay] = {}


def register(way: KernelWay) -> KernelWay:
    """Let a way take part; the first of an operation is what the others are compared with.

    Raises:
        ValueError: there is one of this name.
    """
    if way.key in _REGISTERED:
        raise ValueError(f"two ways are called {way.key!r}")
    _REGISTERED[way.key] = way
    return way


def registered() -> tuple[KernelWay, ...]:
    """All ways of the kernels that this process has imported, by operation."""
    order = list(dict.fromkeys(way.operation.name for way in _REGISTERED.values()))
    return tuple(sorted(_REGISTERED.values(), key=lambda way: order.index(way.operation.name)))


# Proofs.


@dataclass(frozen=True)
class WayProof:
    """The largest error of a way against float64, or why there is none.

    ``absent``: it doesn't run here at all, which is no fault of it.
    """

    error: float = 0.0
    bound: float = 0.0
    absent: str = ""
    failed: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with its result, in words; empty where nothing is."""
        if self.failed:
            return f"it can't run here: {self.failed}"
        if self.absent or self.error <= self.bound:
            return ""
        return (
            f"its result is wrong: the largest error against float64 is {self.error:.1e}, and "
            f"{self.bound:.0e} is allowed"
        )


def prove(ways: Sequence[KernelWay], device: str = "cpu") -> dict[str, WayProof]:
    """Compare every way with its formula in float64, on one small input."""
    with _alone(device):
        return {way.key: _proof(way, device) for way in ways}


def _proof(way: KernelWay, device: str) -> WayProof:
    if absent := way.why_not(device):
        return WayProof(absent=absent)
    inputs = way.operation.draw(PROOF_SIZE, 0, torch.Generator().manual_seed(0))
    given = _moved(inputs, way.dtype, "cpu")  # rounded once, for the way and for the formula
    expected = way.operation.formula(*_moved(given, torch.float64, "cpu"))
    try:
        found = way.run(*_moved(given, way.dtype, device))
        errors = [_error(*pair) for pair in zip(found, expected, strict=True)]
    except Exception as error:  # compilers and drivers raise what they like
        words = (str(error).splitlines() or [type(error).__name__])[0]
        return WayProof(bound=way.bound, failed=f"{words:.120}")
    return WayProof(max(errors), way.bound)


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest error over a number's size and the root mean square of all; inf for no number."""
    if found.shape != expected.shape:
        return math.inf
    scale = expected.abs() + expected.square().mean().sqrt()
    error = ((found.detach().cpu().double() - expected).abs() / scale.clamp(min=1e-30)).max().item()
    return error if math.isfinite(error) else math.inf


# Times.


@dataclass(frozen=True)
class WayTimes:
    """Seconds of a way in each round of its operation, and its median rate in units a second.

    One that is hopelessly slow has the seconds of a single small pass.
    """

    seconds: tuple[float, ...]
    rate: float


@dataclass(frozen=True)
class Gain:
    """How many times as fast: the median ratio of rounds, and its 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def sure(self) -> bool:
        """Whether it is faster beyond doubt."""
        return self.low > 1

    @property
    def lost(self) -> bool:
        """Whether it is no faster, beyond doubt."""
        return self.high <= 1

    def __str__(self) -> str:
        return f"{self.ratio:.2f}× [{self.low:.2f}, {self.high:.2f}]"


def gain(base: WayTimes, other: WayTimes) -> Gain:
    """How many times as fast ``other`` is."""
    if min(len(base.seconds), len(other.seconds)) < FEWEST:
        ratio = other.rate / base.rate
        return Gain(ratio, ratio, ratio, 1)
    ratios = [one / two for one, two in zip(base.seconds, other.seconds, strict=False)]
    return Gain(statistics.median(ratios), *median_interval(ratios), len(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of at least six values between which the median lies with 95 %, by the sign test.

    Of n values, k or fewer lie below the true median as often as a coin shows k heads in n throws.
    """
    count, cut, chance = len(values), 0, 0.5 ** len(values)
    while 2 * (chance + math.comb(count, cut + 1) * 0.5**count) <= DOUBT:
        cut += 1
        chance += math.comb(count, cut) * 0.5**count
    ordered = sorted(values)
    return ordered[cut], ordered[-1 - cut]


def time_ways(
    ways: Sequence[KernelWay],
    proofs: Mapping[str, WayProof],
    device: str = "cpu",
    seconds_of: Seconds | None = None,
) -> dict[str, WayTimes]:
    """Time the ways of each operation in turns; those that don't run or are wrong are left out.

    ``seconds_of`` tells how long a call worked.
    """
    sound = [w for w in ways if not proofs[w.key].absent and not proofs[w.key].fault]
    operations = {way.operation.name: way.operation for way in sound}
    found: dict[str, WayTimes] = {}
    with _alone(device):
        for operation in operations.values():
            mine = [way for way in sound if way.operation.name == operation.name]
            try:
                found |= _race(operation, mine, device, seconds_of or _seconds_of(device))
            except RuntimeError as error:  # memory, or a driver; nothing is known of its ways then
                words = (str(error).splitlines() or [""])[0]
                _LOG.warning("%s can't be timed on this machine: %.120s", operation.name, words)
    return found


def _race(
    operation: Operation, ways: Sequence[KernelWay], device: str, seconds_of: Seconds
) -> dict[str, WayTimes]:
    generator = torch.Generator().manual_seed(0)

    def turn(way: KernelWay, inputs: Inputs) -> float:
        given = _moved(inputs, way.dtype, device)
        return max(seconds_of(lambda: way.run(*given)), 1e-9)

    # The first of two passes starts libraries, and compiles where one compiles for a shape.
    small = operation.draw(SMALL, 0, generator)
    passes = {way.key: min(turn(way, small) for _ in range(2)) for way in ways}
    slowest = HOPELESS * passes[ways[0].key]
    found = {
        way.key: WayTimes((passes[way.key],), operation.work(*small) / passes[way.key])
        for way in ways
        if passes[way.key] > slowest
    }
    raced = [way for way in ways if way.key not in found]
    expected = FEWEST * sum(passes[way.key] for way in raced) / SMALL
    size = min(1.0, operation.seconds / expected)
    times: dict[str, list[float]] = {way.key: [] for way in raced}
    rates: dict[str, list[float]] = {way.key: [] for way in raced}
    spent = 0.0
    for number in range(MOST):
        if number >= FEWEST and spent * (number + 1) > operation.seconds * number:
            break
        inputs = operation.draw(size, number, generator)
        first = number % len(raced)
        for way in (*raced[first:], *raced[:first]):
            seconds = turn(way, inputs)
            times[way.key].append(seconds)
            rates[way.key].append(operation.work(*inputs) / seconds)
            spent += seconds
    return found | {
        key: WayTimes(tuple(seconds), statistics.median(rates[key]))
        for key, seconds in times.items()
    }


def _seconds_of(device: str) -> Seconds:
    def on_processor(act: Callable[[], Any]) -> float:
        began = time.thread_time()
        act()
        return time.thread_time() - began

    def on_accelerator(act: Callable[[], Any]) -> float:
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        act()
        torch.accelerator.synchronize(device)
        return time.perf_counter() - began

    return on_processor if device == "cpu" else on_accelerator


def _moved(inputs: Inputs, dtype: torch.dtype, device: str) -> Inputs:
    """Copies of the tensors on the device, those with a fraction in the format."""
    return tuple(
        value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
        if isinstance(value, Tensor)
        else value
        for value in inputs
    )


@contextlib.contextmanager
def _alone(device: str) -> Iterator[None]:
    """One thread on a processor, and torch as it is by default, wherever this is called."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        kind = torch.device(device).type
        autocast: Any = torch.autocast(kind, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), autocast, torch.device("cpu"):
            yield
    finally:
        if device == "cpu":
            torch.set_num_threads(before)


# What is kept of a machine.


@dataclass(frozen=True)
class DeviceFigures:
    """What was found out about every way on one device of this machine."""

    device: str
    measured_at: str
    cpu_seconds: float
    proofs: Mapping[str, WayProof] = field(default_factory=dict)
    times: Mapping[str, WayTimes] = field(default_factory=dict)

    def gain(self, base: str, other: str) -> Gain | None:
        """How many times as fast one way is as another, by their keys; None: one isn't known."""
        if base not in self.times or other not in self.times:
            return None
        return gain(self.times[base], self.times[other])

    @classmethod
    def from_dict(cls, found: Any) -> DeviceFigures:
        """What ``asdict`` gave, by way of JSON; raises ValueError, TypeError or KeyError."""
        proofs = {key: WayProof(**proof) for key, proof in found["proofs"].items()}
        times = {
            key: WayTimes(tuple(float(s) for s in told["seconds"]), float(told["rate"]))
            for key, told in found["times"].items()
        }
        numbers = [n for told in times.values() for n in (*told.seconds, told.rate)]
        if not all(0 < n < math.inf for n in numbers):
            raise ValueError("a time in it is not a positive number")
        return cls(**{**found, "proofs": proofs, "times": times})


def proofs_here(device: str = "cpu") -> Mapping[str, WayProof]:
    """The proofs of all registered ways on a device; made once for a machine and its versions."""
    return (kept_figures(device) or _kept("proofs", device)).proofs


def figures_here(device: str = "cpu", fresh: bool = False) -> DeviceFigures:
    """Proofs and times; measured once for a machine and its versions, or anew if ``fresh``."""
    return _kept("times", device, fresh)


def kept_figures(device: str = "cpu") -> DeviceFigures | None:
    """What was measured before; None where nothing was."""
    path = _path("times", device, registered(), FOLDER)
    return _MEMORY.get(path) or _read(path)


def assume_right(kind: str) -> None:
    """Take all ways as right on devices of this kind, unproven and untimed: they are pretended."""
    _PRETENDED.add(kind)


_MEMORY: dict[Path, DeviceFigures] = {}  # of this process: its files may not be writable
_PRETENDED: set[str] = set()


def _kept(stem: str, device: str, fresh: bool = False) -> DeviceFigures:
    ways = registered()
    if torch.device(device).type in _PRETENDED:
        return DeviceFigures(_name(device), "", 0.0, {way.key: WayProof() for way in ways})
    path = _path(stem, device, ways, FOLDER)
    found = None if fresh else _MEMORY.get(path) or _read(path)
    if found is None:
        found = _measured(device, ways, times=stem == "times")
        _write(path, asdict(found))
    _MEMORY[path] = found
    return found


def _measured(device: str, ways: Sequence[KernelWay], times: bool) -> DeviceFigures:
    before = time.process_time()
    proofs = prove(ways, device)
    timed = time_ways(ways, proofs, device) if times else {}
    spent = round(time.process_time() - before, 2)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return DeviceFigures(_name(device), now, spent, proofs, timed)


def _path(stem: str, device: str, ways: Sequence[KernelWay], folder: Path) -> Path:
    """The file of this device, these ways, versions and sources."""
    here = _machine()
    names = [(way.key, way.bound) for way in ways]
    text = repr(
        (_name(device), here.cpu, here.instruction_sets, torch.__version__, names, _sources())
    )
    with contextlib.suppress(RuntimeError):  # the user has no home
        folder = folder.expanduser()
    return folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@functools.cache
def _machine() -> host.Hardware:
    return host.hardware()


def _name(device: str) -> str:
    if device.startswith("cpu"):
        return _machine().cpu
    name: str = torch.cuda.get_device_name(device)
    return name


@functools.cache
def _sources() -> str:
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for place in SOURCES:
        found = package / place
        for path in sorted(found.rglob("*")) if found.is_dir() else (found,):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> DeviceFigures | None:
    """A result that was kept; None where there is none, or nothing that can be used."""
    try:
        return DeviceFigures.from_dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = type(error).__name__
        _LOG.warning("%s can't be read (%s): the kernels are measured again", path, why)
        return None


def _write(path: Path, found: dict[str, Any]) -> None:
    """Keep it where that is possible; another process may do the same at the same time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, path)
