"""Registry of kernels: verifies them against float64, times variants, stores the results.

- (1) register: the variants of an operation, torch's first. Or a GPU kernel with the
  name by which it can be refused; other code then runs instead.
- (2) verify: each kernel computes small inputs, and the results are compared with a
  float64 reference. GPU kernels run in a child process. So a kernel that hangs or
  writes outside its memory can be refused alone.
- (3) time: the variants of an operation take turns, in rounds of shapes that no earlier
  round had. Training brings new shapes too, and a library may compile for each of them.
- (4) store: one file per device, versions of the libraries, and sources of the kernels.

On a processor everything runs on one thread, and its CPU time is counted. So time in
which other processes use the core doesn't count. With several threads that wait for
each other the same measurement took 2 to 18 s on a busy machine.
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

LEAST_CAPABILITY = (8, 0)  # NVIDIA compute capability required by Triton and FlashAttention-2
FOLDER = Path("~/.cache/hasten/kernels")
COMMAND = (sys.executable, "-m", "hasten.parts.nn.gpu_kernels")  # child that has all kernels
SOURCES = ("parts/kernels/**/*", "parts/nn/*")  # files that stored results depend on
LIBRARIES = ("torch", "triton")  # libraries whose versions stored results depend on
START_SECONDS = 180.0  # timeout for a child's first line: imports, start of a driver
KERNEL_SECONDS = 120.0  # timeout for a kernel's verdict: a few compilations, then milliseconds
END_SECONDS = 30.0  # timeout for the exit of a child that has closed its output
VERIFIED_SHARE = 0.07  # size of a verified input, as a share of the largest round's
SMALL_SHARE = 0.125  # size of the first timed input, as a share of the largest round's
HOPELESS = 6.0  # ratio to the first variant's time; slower variants get no further rounds
MOST_ROUNDS = 12
Inputs = tuple[Any, ...]  # tensors, and other data that describes them
Pairs = Iterator[tuple[Tensor, Tensor]]  # (result of a kernel, reference)
Timer = Callable[[Callable[[], Any]], float]  # runs a function, returns its seconds
_LOG = logging.getLogger(__name__)


# Kernels


@dataclass(frozen=True)
class Sizes:
    """Widths at which kernels run, because block sizes and registers depend on them.

    Args:
        hidden: width of the model; ``between``: width inside its MLP.
        heads: heads of the query; ``groups``: heads of key and value; ``head``: width of each.
        value: width of a value's head, if it isn't ``head``.
        lengths: tokens of each document. Their sum is odd, so no block of rows is full.
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
        name: label in tables.
        unit: unit of ``work``: FLOP or byte.
        inputs: creates inputs of the given sizes in float32.
        reference: computes the results by their definition, from inputs in float64.
        work: returns the work for these inputs, in ``unit``.
        lengths: tokens of each document in the first round; later rounds have a few more.
        seconds: time limit of all rounds together.
    """

    name: str
    unit: str
    inputs: Callable[[Sizes, torch.Generator], Inputs]
    reference: Callable[..., tuple[Tensor, ...]]
    work: Callable[..., float]
    lengths: tuple[int, ...]
    seconds: float = 0.08

    def draw(self, share: float, number: int, generator: torch.Generator) -> Inputs:
        """Returns inputs for round ``number``: ``share`` of the full size, plus ``number``."""
        lengths = tuple(max(int(length * share), 3) + number for length in self.lengths)
        return self.inputs(replace(TIMED, lengths=lengths), generator)


@dataclass(frozen=True)
class KernelVariant:
    """One way to compute an operation, and the bound of its error against float64.

    Args:
        run: computes the results of the operation's reference from inputs in ``dtype``; it may
            overwrite them, because each call gets copies.
        bound: largest allowed error, relative to a number's magnitude plus the root mean square.
        by_hasten: True for a kernel of hasten, False for one of torch.
        why_not: returns why the variant doesn't run on a device; empty if it does.
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
        """Yields pairs of result and reference for one small input."""
        inputs = self.operation.draw(VERIFIED_SHARE, 0, torch.Generator().manual_seed(0))
        return compare(self.run, self.operation.reference, inputs, dtype, device)


@dataclass(frozen=True)
class GpuKernel:
    """A GPU kernel that can be replaced if it fails.

    Args:
        key: name by which the kernel is refused.
        check: yields pairs of result and reference, for sizes, a format and a device.
        bounds: largest allowed error by format, relative to the largest number; 0: equal bits.
        instead: text that names the code that runs after a refusal, and its cost.
        why_not: returns why the kernel can't run on a device at all; empty if it can.
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
        ValueError: a kernel of this name is already registered.
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
    """Disables a GPU kernel in this process; its replacement runs instead."""
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
        absent: why the kernel can't run on this machine at all, which isn't a fault.
        failed: the error with which the kernel failed.
        repeats: False if two runs with equal inputs differed in a bit.
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

    A kernel has no verdict if no child process could start.
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
    """Compares a kernel with float64 in each of its formats; an exception becomes a verdict."""
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
    """Returns the largest error, and a text if shapes or non-finite numbers differ.

    The error is relative to the largest number, or to a number's magnitude plus the root mean
    square of all.
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
    """Yields pairs: a kernel's result, and the reference in float64 from equal inputs."""
    rounded = moved(inputs, "cpu", dtype)
    expected = reference(*moved(rounded, "cpu", torch.float64))
    return zip(run(*moved(rounded, device, dtype)), expected, strict=True)


def moved(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Returns ``values`` with copies of their tensors on a device, floats cast to ``dtype``."""

    def copy(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, copy=True)

    return tree_map_only(Tensor, copy, values)


@contextlib.contextmanager
def _alone(device: str) -> Iterator[None]:
    """Context with torch's default modes, and with one thread on a processor."""
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
_FAILED_STARTS: set[str] = set()  # devices on which a child process printed no verdict


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
    while names and device not in _FAILED_STARTS:
        verdicts = dict(_in_child(names, sizes, device))
        yield from verdicts.items()
        names = [name for name in names if name not in verdicts]
        if not verdicts:  # the child didn't start; this isn't a fault of any kernel
            _FAILED_STARTS.add(device)


def _in_child(names: list[str], sizes: Sizes, device: str) -> Iterator[tuple[str, Verdict]]:
    request = {"kernels": names, "sizes": asdict(sizes), "device": device, "refused": _REFUSED}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*COMMAND, json.dumps(request)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def pass_on(child_output: Any) -> None:
            for line in itertools.chain(child_output, [""]):  # "" marks the end
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

    A hopelessly slow variant has the seconds of a single small pass.
    """

    seconds: tuple[float, ...]
    rate: float


def time_variants(
    kernels: Sequence[KernelVariant],
    verdicts: Mapping[str, Verdict],
    device: str = "cpu",
    timer: Timer | None = None,
) -> dict[str, VariantTimes]:
    """Times the variants of each operation in turns, except those that don't run or are wrong.

    Args:
        timer: measures a call; default: CPU time on a processor, wall time on a GPU.
    """
    by_operation: dict[str, list[KernelVariant]] = {}
    for variant in kernels:
        verdict = verdicts.get(variant.key)
        if verdict is not None and not verdict.absent and not verdict.fault:
            by_operation.setdefault(variant.operation.name, []).append(variant)
    times: dict[str, VariantTimes] = {}
    with _alone(device):
        for name, usable in by_operation.items():
            try:
                times |= _in_turns(usable, device, timer or _timer_for(device))
            except RuntimeError as error:  # memory or driver errors; the variants stay unknown
                reason = (str(error).splitlines() or [""])[0]
                _LOG.warning("%s can't be timed on this machine: %.120s", name, reason)
    return times


def _in_turns(
    usable: Sequence[KernelVariant], device: str, timer: Timer
) -> dict[str, VariantTimes]:
    operation, generator = usable[0].operation, torch.Generator().manual_seed(0)

    def turn(variant: KernelVariant, inputs: Inputs) -> float:
        arguments = moved(inputs, device, variant.dtype)
        return max(timer(lambda: variant.run(*arguments)), 1e-9)

    # Two small passes: the first one may load libraries and compile for this shape.
    small = operation.draw(SMALL_SHARE, 0, generator)
    passes = {variant.key: min(turn(variant, small) for _ in range(2)) for variant in usable}
    slowest = HOPELESS * passes[usable[0].key]
    hopeless = {
        key: VariantTimes((seconds,), operation.work(*small) / seconds)
        for key, seconds in passes.items()
        if seconds > slowest
    }
    timed = [variant for variant in usable if variant.key not in hopeless]
    expected = FEWEST * sum(passes[variant.key] for variant in timed) / SMALL_SHARE
    share = min(1.0, operation.seconds / expected)
    times: dict[str, list[float]] = {variant.key: [] for variant in timed}
    rates: dict[str, list[float]] = {variant.key: [] for variant in timed}
    spent = 0.0
    for number in range(MOST_ROUNDS):
        if number >= FEWEST and spent * (number + 1) > operation.seconds * number:
            break
        inputs = operation.draw(share, number, generator)
        first = number % len(timed)
        for variant in (*timed[first:], *timed[:first]):
            seconds = turn(variant, inputs)
            times[variant.key].append(seconds)
            rates[variant.key].append(operation.work(*inputs) / seconds)
            spent += seconds
    return hopeless | {
        key: VariantTimes(tuple(seconds), statistics.median(rates[key]))
        for key, seconds in times.items()
    }


def _timer_for(device: str) -> Timer:
    def seconds(function: Callable[[], Any]) -> float:
        if device == "cpu":
            began = time.thread_time()
            function()
            return time.thread_time() - began
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        function()
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
        """Returns True if these kernels have verdicts and, if ``times``, were timed."""
        tried = all(kernel.key in self.proofs for kernel in kernels)
        return tried and bool(self.measured_at or not times)

    def gain(self, base: str, other: str) -> Gain | None:
        """Returns the speed-up of ``other`` over ``base``; None if one of them has no times."""
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


_MEMORY: dict[Path, DeviceFigures] = {}  # figures by file, for machines without a writable folder


def is_here(device: str) -> bool:
    """Returns True if this machine has such a device; a plan may be for another machine."""
    kind: str = torch.device(device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def faults(device: str, *operations: Operation) -> tuple[str, ...]:
    """Returns a sentence for each faulty kernel of hasten for these operations on a device."""
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
    """Returns the verdicts of all variants on a device of this machine, stored or measured."""
    return figures_of(variants(), device).proofs


def figures_here(device: str = "cpu", fresh: bool = False) -> DeviceFigures:
    """Returns verdicts and times of all variants; measured again if ``fresh``."""
    return figures_of(variants(), device, times=True, fresh=fresh)


def stored_figures(device: str = "cpu") -> DeviceFigures | None:
    """Returns stored figures with times; None if nothing was timed."""
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
        times: measure the times of variants as well.
        fresh: ignore all stored results.
        retry: verify kernels with a stored fault again.
        before: called with the number of kernels that will be verified.
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
    """Returns what stored results depend on: device, driver, versions, sources of kernels."""
    machine, versions = _machine(), {}
    for package in LIBRARIES:
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
