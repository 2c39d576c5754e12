"""What this computer is: processor, memory, accelerators, and the limits of a container."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from hasten.machine.control_groups import memory_limit
from hasten.machine.environment import world

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


def versions() -> dict[str, str]:
    """Versions of what decides speed and numbers."""
    found = {"python": platform.python_version()}
    for package in ("hasten", "torch", "transformers", "peft", "numpy", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


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
