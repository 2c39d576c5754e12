"""What is known of the machine, the world of ranks and the job before anything runs.

Techniques decide from facts whether they can work here; planner and doctor read the same. This is
the only module that reads environment variables or asks the operating system and the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from hasten.core.control_groups import memory_limit
from hasten.core.launchers import meeting_method, place_of

STARTED_FOR_PLAN = "HASTEN_STARTED_FOR_PLAN"  # set in a process that began again for its plan
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    *("amx_bf16", "amx_fp16", "amx_int8", "sve", "bf16"),
)


@dataclass(frozen=True)
class Accelerator:
    """One GPU as its driver describes it."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Hardware:
    """One machine: processor, memory, accelerators, and the limits a container sets."""

    cpu: str
    physical_cores: int
    usable_cores: int
    memory_bytes: int
    memory_limit_bytes: int
    instruction_sets: tuple[str, ...]
    accelerators: tuple[Accelerator, ...]
    system: str

    @property
    def short(self) -> str:
        """One phrase for a table: ``2 cores, Intel Xeon, 25 GB`` or the accelerator's name."""
        if self.accelerators:
            return f"{len(self.accelerators)} x {self.accelerators[0].name}"
        return f"{self.usable_cores} cores, {self.cpu}, {self.memory_limit_bytes / 1e9:.0f} GB"


@dataclass(frozen=True)
class World:
    """This process among the ranks of the job."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class ModelFacts:
    """Shape of the model that will train, known without building it."""

    architecture: str = "module"
    parameters: int = 0
    hidden_size: int = 0
    layers: int = 0
    vocabulary: int = 0
    tied_head: bool = False
    experts: int = 0
    sliding_window: bool = False
    heads: int = 0
    key_value_heads: int = 0


@dataclass(frozen=True)
class RecordFacts:
    """Lengths of the training records in tokens, or their number alone where they have none."""

    count: int = 0
    tokens: int = 0
    longest: int = 0
    trained_share: float = 1.0


@dataclass(frozen=True)
class Facts:
    """Everything a technique may decide from."""

    hardware: Hardware
    device: str = "cpu"
    world: World = World()
    model: ModelFacts = ModelFacts()
    records: RecordFacts = RecordFacts()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return not self.device.startswith("cpu")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def hardware() -> Hardware:
    """Look at this machine."""
    memory = psutil.virtual_memory().total
    return Hardware(
        cpu=_cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        usable_cores=usable_cores(),
        memory_bytes=memory,
        memory_limit_bytes=min(memory, memory_limit() or memory),
        instruction_sets=_instruction_sets(),
        accelerators=_accelerators(),
        system=f"{platform.system()} {platform.release()}",
    )


def usable_cores() -> int:
    """Cores this process may run on, which a container or an affinity mask can lower."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_device() -> str:
    """``cpu``, or the accelerator of this local rank."""
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # is_available() said so
    return f"{kind.type}:{world().local_rank % torch.accelerator.device_count()}"


def world() -> World:
    """The rank that torchrun, Slurm, MPI or hasten's own starter gave this process."""
    found = place_of(os.environ)
    return World(found.rank, found.local_rank, found.size) if found else World()


def meeting() -> tuple[str, str]:
    """Where ranks find each other, as torch.distributed writes it, and in words."""
    return meeting_method(os.environ)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``extra`` on top, for a process to be started."""
    return {**os.environ, **extra}


def take_over(variables: Mapping[str, str]) -> None:
    """Go on with these variables, in a process that began before they were known."""
    os.environ.update(variables)


def variable(name: str) -> str | None:
    """A variable of this process's environment, for a technique that adds to it."""
    return os.environ.get(name)


def not_yet_so(wanted: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that this process wasn't started with.

    Empty in a process that was started once more for them: whatever is missing then stays so.
    """
    if STARTED_FOR_PLAN in os.environ:
        return {}
    return {k: v for k, v in wanted.items() if os.environ.get(k) != v}


def is_shown_some_gpus() -> bool:
    """Whether a variable hides GPUs of this machine from this process."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return any(name in os.environ for name in names)


def ranks_here(world: World) -> int:
    """Ranks on this machine: launchers say how many; all of them, where nobody does."""
    found = place_of(os.environ)
    return max(1, found.local_size or found.size) if found else world.size


def versions() -> dict[str, str]:
    """Versions of what decides speed and numbers."""
    found = {"python": platform.python_version()}
    for package in ("hasten", "torch", "transformers", "peft", "numpy", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def seen_at_start() -> Facts:
    """Facts before the job is known."""
    return Facts(hardware(), default_device(), world(), versions=versions())


def host_memory_peak() -> int:
    """Largest resident size of this process in bytes since start or the last reset."""
    for line in _lines("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_memory_peak(device: str) -> None:
    """Forget the peaks so far, so that preparing data doesn't count as training (Linux, GPU)."""
    with contextlib.suppress(OSError):  # elsewhere the peak since the process began has to do
        Path("/proc/self/clear_refs").write_text("5")
    if not device.startswith("cpu"):
        torch.accelerator.memory.reset_peak_memory_stats(device)


def memory_peak(device: str) -> int:
    """Peak bytes on the training device: the allocator's on a GPU, the process's on a CPU."""
    if device.startswith("cpu"):
        return host_memory_peak()
    return int(torch.accelerator.memory.max_memory_allocated(device))


def device_utilisation(device: str) -> float | None:
    """Share of the driver's last sampling period in which a kernel ran; None where it can't say."""
    if not device.startswith("cuda"):
        return None
    try:  # needs NVML's Python package and permission to ask
        return float(torch.cuda.utilization(torch.device(device))) / 100
    except (ImportError, RuntimeError):
        return None


def accelerator_uuids(device: str, count: int) -> list[str]:
    """Names by which the driver knows the first so many GPUs of this process; empty without one."""
    if not device.startswith("cuda"):
        return []
    known = range(min(count, torch.cuda.device_count()))
    first = int(device.partition(":")[2] or 0) if count == 1 else 0
    return [str(torch.cuda.get_device_properties(first + index).uuid) for index in known]


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return ()


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _instruction_sets() -> tuple[str, ...]:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            return tuple(name for name in INSTRUCTION_SETS if name in flags)
    return ()


def _accelerators() -> tuple[Accelerator, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(Accelerator(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"))
    return tuple(found)
