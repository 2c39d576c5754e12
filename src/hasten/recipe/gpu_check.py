"""First contact with a GPU: kernels are tried before they are trusted, and ranks their devices.

    verdicts kept for this GPU, driver and versions? -- yes --> refuse what failed then
                       | no
    a child process tries each kernel (parts/nn/gpu_kernels.py), small, against float64
                       |
    a kernel that is wrong, fails, hangs or takes its process along is refused: something else
    runs in its place, and one sentence says which, why and what that costs

Nothing of it runs on a processor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hasten.core.facts import Facts, ModelFacts
from hasten.errors import InputError
from hasten.machine import host
from hasten.machine.environment import World
from hasten.machine.gpu import Gpus
from hasten.machine.locks import one_writer
from hasten.parts.comm.topology import host_name
from hasten.parts.kernels import refused
from hasten.parts.nn import gpu_kernels
from hasten.parts.nn.causal_lm import causal_lm
from hasten.parts.nn.gpu_kernels import Sizes, Verdict, kernel_named, names_on

Tell = Callable[[str], None]

FOLDER = Path("~/.cache/hasten/gpu")
COMMAND = (sys.executable, "-m", gpu_kernels.__name__)
START_SECONDS = 180.0  # imports and a driver's start on a busy machine
KERNEL_SECONDS = 120.0  # a few compilations, then milliseconds
END_SECONDS = 30.0  # of a process that has closed its output


@dataclass(frozen=True)
class Limits:
    """How long a child process may be silent: before its first kernel, and in each."""

    start_seconds: float = START_SECONDS
    kernel_seconds: float = KERNEL_SECONDS


def check_kernels(known: Facts, tell: Tell, *, again: bool = False) -> list[Verdict]:
    """Try this rank's GPU's kernels where nobody has before, and refuse what doesn't work.

    Ranks of a machine take turns, and all but the first of each kind of GPU find its verdicts.

    Args:
        tell: is told a sentence for each kernel that is refused, and before any is tried.
        again: try once more what was refused before.
    """
    if not known.on_gpu:
        return []
    sizes, name = sizes_of(known.model), host.accelerator_words(known.device)
    names = names_on(known.device)
    if not names:
        return []
    verdicts = kept_or_tried(names, sizes, known.device, name, tell, again=again)
    for sentence in apply(verdicts, name):
        tell(sentence)
    if len(verdicts) < len(names):
        asked = json.dumps({"kernels": names, "device": known.device})
        tell(f"no kernel could be tried on {name}; see what {' '.join(COMMAND[1:])} '{asked}' says")
    return verdicts


def apply(verdicts: Sequence[Verdict], gpu: str) -> list[str]:
    """Refuse what failed; a sentence for each: which, why, what runs instead, what it costs."""
    found = []
    for verdict in verdicts:
        if not verdict.good:
            refused.refuse(verdict.kernel, verdict.why)
            instead = kernel_named(verdict.kernel).instead
            found.append(f"{verdict.kernel} isn't used on {gpu}: {verdict.why}; {instead}")
    return found


def sizes_of(model: ModelFacts) -> Sizes:
    """Widths of a model as far as they are known."""
    usual = Sizes()
    hidden, heads = model.hidden_size or usual.hidden, model.heads or usual.heads
    return Sizes(
        hidden=hidden,
        between=4 * hidden,
        heads=heads,
        groups=model.key_value_heads or heads,
        head=max(hidden // heads // 8 * 8, 16),
    )


def without_refused(model: torch.nn.Module) -> None:
    """Give a model that multiplies its experts in groups another way, where that one is refused."""
    if refused.is_refused("grouped_mm"):
        inner = causal_lm(model)
        if getattr(inner.config, "_experts_implementation", None) == "grouped_mm":
            inner.set_experts_implementation("eager")


# What is kept.


def identity(gpu: str, sizes: Sizes) -> dict[str, Any]:
    """All that a verdict depends on; where one changes, kernels are tried again."""
    return {
        "gpu": gpu,
        "driver": Gpus().driver,
        "versions": [_version(package) for package in ("torch", "triton", "liger-kernel")],
        "sizes": dataclasses.asdict(sizes),
        "kernels": _sources(),
    }


def kept_or_tried(
    names: Sequence[str],
    sizes: Sizes,
    device: str,
    gpu: str,
    tell: Tell = lambda text: None,
    *,
    again: bool = False,
    folder: Path = FOLDER,
    command: Sequence[str] = COMMAND,
    limits: Limits | None = None,
) -> list[Verdict]:
    """The verdicts of these kernels, from the folder, or from a child process and kept there."""
    about = identity(gpu, sizes)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    try:
        place = folder.expanduser()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with one_writer(place / f"{key}.lock"):
            kept = _read(place / f"{key}.json")
            known = {v.kernel: v for v in kept if v.good or not again}
            missing = [name for name in names if name not in known]
            if missing:
                tell(f"trying {len(missing)} kernels on {gpu}, once for it and these versions")
            for verdict in tried(missing, sizes, device, command, limits or Limits()):
                known[verdict.kernel] = verdict
            if missing:
                rows = [dataclasses.asdict(v) for v in known.values()]
                _write(place / f"{key}.json", {"about": about, "verdicts": rows})
    except (OSError, RuntimeError):  # no home, or a disk that is full: only nothing is kept
        known = {v.kernel: v for v in tried(names, sizes, device, command, limits or Limits())}
    return [known[name] for name in names if name in known]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sources() -> str:
    """A digest of the files that kernels and their checks are written in."""
    root = Path(gpu_kernels.__file__).parents[1]
    files = sorted([*root.glob("nn/*gpu*.py"), *root.glob("nn/quantised.py")])
    files += sorted([*root.glob("kernels/*_triton.py"), root / "kernels/adamw.py"])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _read(file: Path) -> list[Verdict]:
    """Verdicts that were kept; none where the file isn't one of ours."""
    try:
        return [Verdict(**row) for row in json.loads(file.read_text())["verdicts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _write(file: Path, content: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
    with open(handle, "w") as stream:
        json.dump(content, stream, indent=1)
    os.replace(name, file)


# The child process.


def tried(
    names: Sequence[str], sizes: Sizes, device: str, command: Sequence[str], limits: Limits
) -> Iterator[Verdict]:
    """A verdict for each kernel; a child that hangs or dies is replaced for those that are left."""
    left = list(names)
    while left:
        before = len(left)
        for verdict in _of_one_child(left, sizes, device, command, limits):
            left.remove(verdict.kernel)
            yield verdict
        if len(left) == before:  # no child even begins: it says nothing about kernels
            return


def _of_one_child(
    names: Sequence[str], sizes: Sizes, device: str, command: Sequence[str], limits: Limits
) -> Iterator[Verdict]:
    asked = {"kernels": list(names), "sizes": dataclasses.asdict(sizes), "device": device}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(asked)], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
        current, seconds = "", limits.start_seconds
        try:
            while True:
                line = lines.get(timeout=seconds)
                if line is None:
                    process.wait(END_SECONDS)
                    break
                row = _row(line)
                if "begins" in row:
                    current, seconds = row["begins"], limits.kernel_seconds
                elif row:
                    current = ""
                    yield Verdict(**row)
        except (queue.Empty, subprocess.TimeoutExpired):
            if current:
                yield Verdict(current, f"it hadn't ended after {seconds:.0f} s")
            return
        finally:
            process.kill()
            process.wait()
        if current:
            yield Verdict(current, f"its process ended ({_last_line(errors, process.returncode)})")


def _pass_on(stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _row(line: str) -> dict[str, Any]:
    """A line of the child's; others are a library's."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and ({"begins", "kernel"} & set(found)) else {}


def _last_line(errors: Any, code: int) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return f"exit code {code}{': ' + lines[-1][:120] if lines else ''}"


# Ranks.


def check_ranks(world: World, device: str) -> None:
    """Each rank computes on a device of its own, and reaches all others; all ranks call it.

    Raises:
        InputError: two ranks have one GPU, a rank's is another than its current one, it can't
            multiply, or a sum over ranks comes out wrong.
    """
    if world.size == 1:
        return
    place = torch.device(device)
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, (host_name(), device, _fault(place)))
    for rank, (machine, its, fault) in enumerate(told):
        if fault:
            raise InputError(f"rank {rank} ({its} of {machine}): {fault}")
        shared = [r for r, other in enumerate(told) if other[:2] == (machine, its)]
        if place.type != "cpu" and len(shared) > 1:
            raise InputError(
                f"ranks {shared[0]} and {shared[1]} have the same GPU, {its} of {machine}: start "
                "no more ranks than GPUs there, and let the launcher set LOCAL_RANK"
            )
    one = torch.ones(1, device=place)
    dist.all_reduce(one)
    if one.item() != world.size:
        raise InputError(
            f"a sum of 1 over {world.size} ranks came out as {one.item():g} on rank {world.rank}: "
            "the GPUs' link carries wrong numbers; see NCCL_DEBUG=INFO, or try NCCL_P2P_DISABLE=1"
        )


def _fault(place: torch.device) -> str:
    """What is wrong with a rank's device; empty where nothing is."""
    if place.type != "cpu" and place.index != torch.accelerator.current_device_index():
        return (
            f"its current device is number {torch.accelerator.current_device_index()}; call "
            "torch.accelerator.set_device_index before the ranks meet"
        )
    try:
        side = torch.ones(64, 64, device=place)
        total = (side @ side).sum().item()
    except RuntimeError as error:
        return f"it can't multiply two matrices: {str(error).splitlines()[0]}"
    return "" if total == 64**3 else f"a product of ones came out as {total:g}, not {64**3}"
