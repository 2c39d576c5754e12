"""Kernels that a machine may use: each with reference, bound, and reason if unusable.

- (1) register: a variant of an operation, next to torch's variant that it replaces. Or
  a GPU kernel that is refused by name, and the code that runs instead of it.
- (2) verify: each computes small inputs, compared with float64. On a GPU a child
  process does it. So only the kernel itself is refused if it hangs or writes outside
  its memory.
- (3) time: the variants of an operation take turns, in rounds of shapes that no earlier
  round had. A library that compiles a kernel for every shape is slower in training than
  its products.
- (4) store: one file has the results for this device, the versions and the sources of
  the kernels.

On a processor everything runs on one thread. Its seconds are those in which this thread
worked, so time in which others had its core doesn't count. With several threads that
wait for each other the same measurement took 2 to 18 s on a busy machine.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import logging
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hasten.machine import cache, host
from hasten.machine.gain import FEWEST, Gain
from hasten.machine.gpu import Gpus
from hasten.machine.locks import one_writer

LEAST_CAPABILITY = (8, 0)  # NVIDIA's, required by Triton and FlashAttention-2
FOLDER = Path("~/.cache/hasten/kernels")
COMMAND = (sys.executable, "-m", "hasten.parts.nn.gpu_kernels")  # registers all kernels
SOURCES = ("parts/kernels/**/*", "parts/nn/*")  # files that stored results depend on
PACKAGES = ("torch", "triton")
START_SECONDS = 180.0  # longest silence of a child process: imports, start of a driver
KERNEL_SECONDS = 120.0  # longest silence in a kernel: a few compilations, then milliseconds
END_SECONDS = 30.0  # longest end of a process that has closed its output
PROOF_SHARE = 0.07  # share of a round's input
SMALL_SHARE = 0.125  # share of a round's input; shows a round's time and hopeless variants
HOPELESS = 6.0  # times the first variant's in the small pass: a slower one isn't timed further
MOST = 12  # most rounds
Inputs = tuple[Any, ...]  # tensors, and other data that describes them
Pairs = Iterator[tuple[Tensor, Tensor]]  # (result of a kernel, reference)
Seconds = Callable[[Callable[[], Any]], float]
_LOG = logging.getLogger(__name__)


# Kernels


@dataclass(frozen=True)
class Sizes:
    """Widths at which kernels run, because block sizes and registers depend on them.

    Args:
        hidden: of the model, ``between`` of its MLP, ``head`` of one of ``heads`` heads of queries;
            keys have ``groups`` of them.
        value: of one head of values; 0: as wide as one of keys.
        lengths: tokens of each document; odd together, so that no block of rows is full.
    """

    hidden: int = 512
    between: int = 1376
    heads: int = 8
    groups: int = 2
    head: int = 64
    value: int = 0
    lengths: tuple[int, ...] = (21, 16)

    @property
    def rows(self) -> int:
        return sum(self.lengths)


TIMED = Sizes(hidden=256, between=688, heads=4, groups=4)


@dataclass(frozen=True)
class Operation:
    """An operation that several variants compute.

    Args:
        name: label in a table for people.
        unit: unit of ``work``: FLOP or byte.
        inputs: creates inputs in float32, of the given sizes.
        reference: the results by their definition, from inputs in float64.
        work: returns the work of such inputs.
        lengths: tokens of each document in the largest round; every round has other ones.
        seconds: time for the work of all rounds together.
    """

    name: str
    unit: str
    inputs: Callable[[Sizes, torch.Generator], Inputs]
    reference: Callable[..., tuple[Tensor, ...]]
    work: Callable[..., float]
    lengths: tuple[int, ...]
    seconds: float = 0.08

    def draw(self, share: float, number: int, generator: torch.Generator) -> Inputs:
        """Returns inputs of a share of the largest size, for the round of this number."""
        lengths = tuple(max(int(length * share), 3) + number for length in self.lengths)
        return self.inputs(replace(TIMED, lengths=lengths), generator)


@dataclass(frozen=True)
class KernelVariant:
    """One way to compute an operation, and the bound of its error against float64.

    Args:
        run: from inputs in ``dtype`` to the results of the operation's reference; the inputs are
            its own and may be overwritten.
        bound: the largest error, over the sum of a number's size and the root mean square of all.
        by_hasten: True for a kernel of hasten, False for one of torch.
        why_not: why it doesn't run on a device, in words; empty where it does.
    """

    operation: Operation
    name: str
    dtype: torch.dtype
    run: Callable[..., tuple[Tensor, ...]]
    bound: float
    by_hasten: bool = True
    why_not: Callable[[str], str] = lambda device: ""

    @property
    def key(self) -> str:
        return f"{self.operation.name}: {self.name}"

    @property
    def bounds(self) -> dict[torch.dtype, float]:
        return {self.dtype: self.bound}

    def check(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Pairs:
        """Yields its results and the references, for one small input."""
        inputs = self.operation.draw(PROOF_SHARE, 0, torch.Generator().manual_seed(0))
        return compare(self.run, self.operation.reference, inputs, dtype, device)


@dataclass(frozen=True)
class GpuKernel:
    """A kernel of GPU processes that can be replaced if it fails.

    Args:
        key: the name by which it is refused.
        check: its results and the truth, for sizes, a format and a device.
        bounds: how far a result may be off, by format, as a part of the largest; 0: not a bit.
        instead: what runs instead, and what that costs.
        why_not: why there is nothing to try on a device; empty where there is.
    """

    key: str
    check: Callable[[Sizes, torch.dtype, torch.device], Pairs]
    bounds: dict[torch.dtype, float]
    instead: str
    why_not: Callable[[str], str]


Kernel = KernelVariant | GpuKernel
_REGISTERED: dict[str, Kernel] = {}


def register(*kernels: Kernel) -> None:
    """Adds kernels; the first variant of an operation is the baseline for the others.

    Raises:
        ValueError: there is one of this name.
    """
    for kernel in kernels:
        if kernel.key in _REGISTERED:
            raise ValueError(f"two kernels are called {kernel.key!r}")
        _REGISTERED[kernel.key] = kernel


def variants() -> tuple[KernelVariant, ...]:
    """Returns all variants of the kernels that this process has imported, by operation."""
    kernels = [kernel for kernel in _REGISTERED.values() if isinstance(kernel, KernelVariant)]
    order = list(dict.fromkeys(variant.operation.name for variant in kernels))
    return tuple(sorted(kernels, key=lambda variant: order.index(variant.operation.name)))


def gpu_kernels() -> tuple[GpuKernel, ...]:
    """Returns all kernels that can be refused by name."""
    return tuple(kernel for kernel in _REGISTERED.values() if isinstance(kernel, GpuKernel))


# Refusals are valid for the whole process, like the GPU and its driver.

_REFUSED: dict[str, str] = {}


def refuse(kernel: str, reason: str) -> None:
    """Replaces a GPU kernel by other code in this process."""
    _REFUSED[kernel] = reason


def allow_all() -> None:
    """Allows every kernel again."""
    _REFUSED.clear()


def is_refused(kernel: str) -> bool:
    """Returns True if other code must run instead of the kernel."""
    return kernel in _REFUSED


# Verification


@dataclass(frozen=True)
class Verdict:
    """The largest error of a kernel against float64, or the reason why there is none.

    Args:
        absent: why it doesn't run here at all, which is no fault of it.
        failed: what went wrong when it ran.
        repeats: it gave the same bits twice, where it ran twice.
    """

    error: float = 0.0
    bound: float = 0.0
    absent: str = ""
    failed: str = ""
    repeats: bool = True

    @property
    def fault(self) -> str:
        """Returns the fault of its result as text; empty if there is none."""
        if self.failed:
            return f"it can't run here: {self.failed}"
        if self.absent or self.error <= self.bound:
            return ""
        return (
            f"its result is wrong: the largest error against float64 is {self.error:.1e}, and "
            f"{self.bound:.0e} is allowed"
        )


def verify(
    kernels: Sequence[Kernel], device: str = "cpu", sizes: Sizes | None = None
) -> dict[str, Verdict]:
    """Compares kernels with float64, on a GPU in a child process.

    A kernel that no child process got to has no verdict.
    """
    sizes = sizes or Sizes()
    absent = {each.key: Verdict(absent=why) for each in kernels if (why := each.why_not(device))}
    present = [kernel for kernel in kernels if kernel.key not in absent]
    if device == "cpu":
        with _alone(device):
            verdicts = {kernel.key: checked(kernel, sizes, device) for kernel in present}
    else:
        verdicts = dict(_in_children([kernel.key for kernel in present], sizes, device))
    verdicts |= absent
    return {kernel.key: verdicts[kernel.key] for kernel in kernels if kernel.key in verdicts}


def checked(kernel: Kernel, sizes: Sizes, device: str) -> Verdict:
    """Runs a kernel in each of its formats and compares; errors become verdicts too."""
    torch_device, refusable = torch.device(device), isinstance(kernel, GpuKernel)
    worst, repeats = 0.0, True
    for dtype, bound in kernel.bounds.items():
        name = str(dtype).removeprefix("torch.")
        try:
            pairs = list(kernel.check(sizes, dtype, torch_device))
            again = list(kernel.check(sizes, dtype, torch_device)) if refusable else pairs
        except Exception as error:  # any error of a compiler, a driver or a kernel
            kind, text = type(error).__name__, str(error).strip().partition("\n")[0]
            failed = f"{name}: {kind}: {text:.160}" if refusable else f"{text or kind:.120}"
            return Verdict(bound=bound, failed=failed)
        for output, expected in pairs:
            off, fault = difference(output, expected, of_largest=refusable)
            if refusable and off > bound:
                fault = fault or f"off by {off:.2g} of the largest number, at most {bound:.2g}"
                return Verdict(bound=bound, failed=f"{name}: {fault}")
            worst = max(worst, off)
        repeats &= all(
            torch.equal(one.nan_to_num(), other.nan_to_num())
            for (one, _), (other, _) in zip(pairs, again, strict=True)
        )
    return Verdict(worst, max(kernel.bounds.values()), repeats=repeats)


def difference(output: Tensor, expected: Tensor, of_largest: bool = False) -> tuple[float, str]:
    """Returns the largest error, and a fault that isn't a matter of size.

    Over the sum of a number's size and the root mean square of all, or over the largest number.
    """
    if output.shape != expected.shape:
        shapes = f"{tuple(output.shape)} instead of {tuple(expected.shape)}"
        return math.inf, f"a result of shape {shapes}"
    one, other = output.detach().cpu().double(), expected.detach().cpu().double()
    if count := int((one.isfinite() != other.isfinite()).sum()):
        fault = f"{count} of {one.numel()} numbers are infinite or NaN where they shouldn't be"
        return math.inf, fault
    one, other = (t.where(t.isfinite(), 0.0) for t in (one, other))
    if not other.numel():
        return 0.0, ""
    if of_largest:
        scale = other.abs().max().clamp_min(0.5)
    else:
        scale = (other.abs() + other.square().mean().sqrt()).clamp_min(1e-30)
    return ((one - other).abs() / scale).max().item(), ""


def compare(
    run: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device,
) -> Pairs:
    """Yields the results of a kernel and of its reference in float64, from equal inputs."""
    rounded = moved(inputs, "cpu", dtype)
    expected = reference(*moved(rounded, "cpu", torch.float64))
    return zip(run(*moved(rounded, device, dtype)), expected, strict=True)


def moved(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Returns values with their tensors on a device, floating ones in a format."""

    def copy(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, copy=True)

    return tree_map_only(Tensor, copy, values)


@contextlib.contextmanager
def _alone(device: str) -> Iterator[None]:
    """Sets one thread on a processor and torch's defaults inside."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        autocast: Any = torch.autocast(torch.device(device).type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), autocast, torch.device("cpu"):
            yield
    finally:
        if device == "cpu":
            torch.set_num_threads(before)


# The child process: prints a line when a kernel begins, and one with its verdict.

MARK = "hasten: "
_SILENT: set[str] = set()  # devices on which no child of this process starts


def main(arguments: Sequence[str]) -> None:
    """Verifies the kernels that its argument names."""
    request = json.loads(arguments[0])
    device, sizes = request["device"], Sizes(**request.get("sizes", {}))
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    for name in request["kernels"]:
        print(f"{MARK}{json.dumps([name, None])}", flush=True)
        kernel = _REGISTERED[name]
        allow_all()  # refused kernels are tried themselves; the others run without them
        _REFUSED.update({} if isinstance(kernel, GpuKernel) else request.get("refused", {}))
        with _alone(device):
            verdict = checked(kernel, sizes, device)
        print(f"{MARK}{json.dumps([name, asdict(verdict)])}", flush=True)


def _in_children(names: list[str], sizes: Sizes, device: str) -> Iterator[tuple[str, Verdict]]:
    """Yields verdicts; a child that hangs or dies is replaced for the remaining kernels."""
    while names and device not in _SILENT:
        verdicts = dict(_in_child(names, sizes, device))
        yield from verdicts.items()
        names = [name for name in names if name not in verdicts]
        if not verdicts:  # no child starts, which says nothing about kernels
            _SILENT.add(device)


def _in_child(names: list[str], sizes: Sizes, device: str) -> Iterator[tuple[str, Verdict]]:
    request = {"kernels": names, "sizes": asdict(sizes), "device": device, "refused": _REFUSED}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*COMMAND, json.dumps(request)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def pass_on(stream: Any) -> None:
            for line in itertools.chain(stream, [""]):
                lines.put(line)

        threading.Thread(target=pass_on, args=(process.stdout,), daemon=True).start()
        current, seconds = "", START_SECONDS
        try:
            while line := lines.get(timeout=seconds):
                if not line.startswith(MARK):  # output of a library
                    continue
                current, verdict = json.loads(line.removeprefix(MARK))
                seconds = KERNEL_SECONDS
                if verdict is not None:
                    yield current, Verdict(**verdict)
                    current = ""
            process.wait(END_SECONDS)
        except (queue.Empty, subprocess.TimeoutExpired):
            if current:
                yield current, Verdict(failed=f"it hadn't ended after {seconds:.0f} s")
            return
        finally:
            process.kill()
            process.wait()
        if current:
            errors.seek(0)
            last = [line.strip()[:120] for line in errors if line.strip()][-1:]
            why = ": ".join([f"exit code {process.returncode}", *last])
            yield current, Verdict(failed=f"its process ended ({why})")


# Times


@dataclass(frozen=True)
class VariantTimes:
    """Seconds of a variant in each round of its operation, and its median rate in units a second.

    One that is hopelessly slow has the seconds of a single small pass.
    """

    seconds: tuple[float, ...]
    rate: float


def time_variants(
    kernels: Sequence[KernelVariant],
    verdicts: Mapping[str, Verdict],
    device: str = "cpu",
    seconds_of: Seconds | None = None,
) -> dict[str, VariantTimes]:
    """Times the variants of each operation in turns, except those that don't run or are wrong.

    Args:
        seconds_of: returns how long a call worked.
    """
    by_operation: dict[str, list[KernelVariant]] = {}
    for variant in kernels:
        verdict = verdicts.get(variant.key)
        if verdict is not None and not verdict.absent and not verdict.fault:
            by_operation.setdefault(variant.operation.name, []).append(variant)
    times: dict[str, VariantTimes] = {}
    with _alone(device):
        for name, sound in by_operation.items():
            try:
                times |= _in_turns(sound, device, seconds_of or _seconds_of(device))
            except RuntimeError as error:  # memory or driver errors; the variants stay unknown
                reason = (str(error).splitlines() or [""])[0]
                _LOG.warning("%s can't be timed on this machine: %.120s", name, reason)
    return times


def _in_turns(
    sound: Sequence[KernelVariant], device: str, seconds_of: Seconds
) -> dict[str, VariantTimes]:
    operation, generator = sound[0].operation, torch.Generator().manual_seed(0)

    def turn(variant: KernelVariant, inputs: Inputs) -> float:
        arguments = moved(inputs, device, variant.dtype)
        return max(seconds_of(lambda: variant.run(*arguments)), 1e-9)

    # The first of two passes loads libraries, and compiles for a shape if needed.
    small = operation.draw(SMALL_SHARE, 0, generator)
    passes = {variant.key: min(turn(variant, small) for _ in range(2)) for variant in sound}
    slowest = HOPELESS * passes[sound[0].key]
    hopeless = {
        key: VariantTimes((seconds,), operation.work(*small) / seconds)
        for key, seconds in passes.items()
        if seconds > slowest
    }
    raced = [variant for variant in sound if variant.key not in hopeless]
    expected = FEWEST * sum(passes[variant.key] for variant in raced) / SMALL_SHARE
    share = min(1.0, operation.seconds / expected)
    times: dict[str, list[float]] = {variant.key: [] for variant in raced}
    rates: dict[str, list[float]] = {variant.key: [] for variant in raced}
    spent = 0.0
    for number in range(MOST):
        if number >= FEWEST and spent * (number + 1) > operation.seconds * number:
            break
        inputs = operation.draw(share, number, generator)
        first = number % len(raced)
        for variant in (*raced[first:], *raced[:first]):
            seconds = turn(variant, inputs)
            times[variant.key].append(seconds)
            rates[variant.key].append(operation.work(*inputs) / seconds)
            spent += seconds
    return hopeless | {
        key: VariantTimes(tuple(seconds), statistics.median(rates[key]))
        for key, seconds in times.items()
    }


def _seconds_of(device: str) -> Seconds:
    def seconds(act: Callable[[], Any]) -> float:
        if device == "cpu":
            began = time.thread_time()
            act()
            return time.thread_time() - began
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        act()
        torch.accelerator.synchronize(device)
        return time.perf_counter() - began

    return seconds


# Stored results


@dataclass(frozen=True)
class DeviceFigures:
    """The verdict and the times of every kernel on one device of this machine."""

    device: str
    measured_at: str = ""  # empty if nothing was timed
    cpu_seconds: float = 0.0
    proofs: Mapping[str, Verdict] = field(default_factory=dict)
    times: Mapping[str, VariantTimes] = field(default_factory=dict)

    def cover(self, kernels: Sequence[Kernel], times: bool) -> bool:
        """Returns True if all requested figures of these kernels are available."""
        tried = all(kernel.key in self.proofs for kernel in kernels)
        return tried and bool(self.measured_at or not times)

    def gain(self, base: str, other: str) -> Gain | None:
        """Returns the speed-up of one variant over another, by keys; None: one isn't known."""
        if base not in self.times or other not in self.times:
            return None
        one, two = self.times[base], self.times[other]
        if min(len(one.seconds), len(two.seconds)) < FEWEST:
            ratio = two.rate / one.rate
            return Gain(ratio, ratio, ratio, 1)
        return Gain.of(one.seconds, two.seconds)

    @classmethod
    def from_dict(cls, entry: Any) -> DeviceFigures:
        """Reads the JSON form of ``asdict``; raises ValueError, TypeError or KeyError."""
        proofs = {key: Verdict(**verdict) for key, verdict in entry["proofs"].items()}
        times = {
            key: VariantTimes(tuple(float(s) for s in timing["seconds"]), float(timing["rate"]))
            for key, timing in entry["times"].items()
        }
        numbers = [n for timing in times.values() for n in (*timing.seconds, timing.rate)]
        if not all(0 < n < math.inf for n in numbers):
            raise ValueError("a time in it is not a positive number")
        return cls(**{**entry, "proofs": proofs, "times": times})


_MEMORY: dict[Path, DeviceFigures] = {}  # results of this process: files may not be writable


def is_here(device: str) -> bool:
    """Returns True if this process has the device; a plan may be for another machine."""
    kind: str = torch.device(device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def faults(device: str, *operations: Operation) -> tuple[str, ...]:
    """Returns faults of hasten's kernels for these operations on a device, a sentence each."""
    if not is_here(device):
        return ()
    proofs, names = proofs_here(device), {operation.name for operation in operations}
    return tuple(
        f"its kernel for {variant.operation.name} ({variant.name}) can't be used: {fault} "
        "(hasten env --bench --fresh looks again)"
        for variant in variants()
        if variant.by_hasten
        and variant.operation.name in names
        and (fault := proofs.get(variant.key, Verdict()).fault)
    )


def proofs_here(device: str = "cpu") -> Mapping[str, Verdict]:
    """Returns the verdicts of all variants on a device; stored per machine and versions."""
    return figures_of(variants(), device).proofs


def figures_here(device: str = "cpu", fresh: bool = False) -> DeviceFigures:
    """Returns verdicts and times, stored per machine and versions; measured again if ``fresh``."""
    return figures_of(variants(), device, times=True, fresh=fresh)


def stored_figures(device: str = "cpu") -> DeviceFigures | None:
    """Returns earlier timings; None if there are none."""
    figures = _kept(_path(device, Sizes()))
    return figures if figures is not None and figures.measured_at else None


def figures_of(
    kernels: Sequence[Kernel],
    device: str,
    sizes: Sizes | None = None,
    *,
    times: bool = False,
    fresh: bool = False,
    retry: bool = False,
    before: Callable[[int], None] = lambda count: None,
) -> DeviceFigures:
    """Returns the stored figures of kernels on a device; measures and stores missing ones.

    Processes of a machine take turns: all but the first read the stored results.

    Args:
        times: the variants among them need timings as well.
        fresh: ignore all stored results.
        retry: ignore stored faults.
        before: is called with the number of kernels that will be tested.
    """
    path = _path(device, sizes or Sizes())
    remembered = _MEMORY.get(path)
    if remembered is not None and not (fresh or retry) and remembered.cover(kernels, times):
        return remembered
    with contextlib.ExitStack() as turn:
        with contextlib.suppress(OSError):  # without a writable folder nothing is stored
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            turn.enter_context(one_writer(path.with_suffix(".lock")))
        figures = (None if fresh else _kept(path)) or DeviceFigures(_name(device))
        if retry:
            right = {key: verdict for key, verdict in figures.proofs.items() if not verdict.fault}
            figures = replace(figures, proofs=right)
        if not figures.cover(kernels, times):
            began = time.process_time()
            missing = [kernel for kernel in kernels if kernel.key not in figures.proofs]
            if missing:
                before(len(missing))
            proofs = {**figures.proofs, **verify(missing, device, sizes)}
            figures = replace(figures, proofs=proofs)
            if times:
                timed = [kernel for kernel in kernels if isinstance(kernel, KernelVariant)]
                figures = replace(
                    figures,
                    times=time_variants(timed, proofs, device),
                    cpu_seconds=round(time.process_time() - began, 2),
                    measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                )
            cache.write(path, asdict(figures))
        _MEMORY[path] = figures
        return figures


def _kept(path: Path) -> DeviceFigures | None:
    again = "the kernels are measured again"
    return _MEMORY.get(path) or cache.read(path, DeviceFigures.from_dict, again)


def _path(device: str, sizes: Sizes) -> Path:
    return cache.path_of(FOLDER, {**_about(device), "sizes": asdict(sizes)})


@functools.cache
def _about(device: str) -> dict[str, Any]:
    """Returns the inputs of the results: this device, and versions and sources of kernels."""
    machine, versions = _machine(), {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "device": (_name(device), machine.cpu, machine.instruction_sets),
        "driver": None if device.startswith("cpu") else Gpus().driver,
        "versions": versions,
        "sources": cache.source_digest(cache.PACKAGE, *SOURCES),
    }


@functools.cache
def _machine() -> host.Hardware:
    return host.hardware()


def _name(device: str) -> str:
    return _machine().cpu if device.startswith("cpu") else str(torch.cuda.get_device_name(device))
