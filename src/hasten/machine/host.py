"""Facts about this computer: processor, memory, accelerators, limits of a container."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from hasten.machine import processes
from hasten.machine.environment import isa_variable, world

# Hardware, cores and memory as seen by this process

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
    """One machine: processor, memory, accelerators, and the limits of a container."""

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
        """Returns a phrase for a table: ``2 cores, Intel Xeon, 25 GB`` or an accelerator's name."""
        if self.accelerators:
            return f"{len(self.accelerators)} x {self.accelerators[0].name}"
        return f"{self.usable_cores} cores, {self.cpu}, {self.memory_limit_bytes / 1e9:.0f} GB"


def hardware() -> Hardware:
    """Returns the description of this machine."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = map(torch.cuda.get_device_properties, range(count))
    return Hardware(
        cpu=_cpu_name(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=usable_memory(),
        instruction_sets=_instruction_sets(),
        accelerators=tuple(
            Accelerator(g.name, g.total_memory, f"{g.major}.{g.minor}") for g in gpus
        ),
        system=f"{platform.system()} {platform.release()}",
    )


def usable_cores() -> int:
    """Returns the cores for this process; a container or an affinity mask can limit them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int:
    """Returns the bytes for this process: the control group's limit, or the machine's memory."""
    memory = psutil.virtual_memory().total
    return min(memory, memory_limit() or memory)


def default_device() -> str:
    """Returns ``cpu``, or the accelerator of this local rank."""
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # is_available() has checked it
    return f"{kind.type}:{world().local_rank % torch.accelerator.device_count()}"


def versions() -> dict[str, str]:
    """Returns versions of packages that affect speed and numbers."""
    packages = ("hasten", "torch", "transformers", "peft", "numpy", "deepspeed")
    installed = {package: _version_of(package) for package in packages}
    python = {"python": platform.python_version()}
    return python | {package: version for package, version in installed.items() if version}


@functools.cache
def _version_of(package: str) -> str | None:
    """Returns the installed version; each read parses the package's full metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def reset_memory_peak(device: str) -> None:
    """Resets the peaks, so that preparing data doesn't count as training (Linux, GPU)."""
    with contextlib.suppress(OSError):  # without Linux's file the peak can't be reset
        Path("/proc/self/clear_refs").write_text("5")
    if not device.startswith("cpu"):
        torch.accelerator.memory.reset_peak_memory_stats(device)


def memory_peak(device: str) -> int:
    """Returns peak bytes: of the device's allocator, or of this process for ``cpu``."""
    if device.startswith("cpu"):
        return processes.host_memory_peak()
    return int(torch.accelerator.memory.max_memory_allocated(device))


def device_utilisation(device: str) -> float | None:
    """Returns the share of the driver's last period in which a kernel ran; None if unreported."""
    if not device.startswith("cuda"):
        return None
    try:
        return float(torch.cuda.utilization(torch.device(device))) / 100
    except Exception:  # NVML's errors, and torch's without the package
        return None


def has_cuda() -> bool:
    """Returns True if this process can use a GPU that NCCL can reach."""
    return bool(torch.cuda.is_available())


def pins_for(device: str | torch.device) -> bool:
    """Returns True if pinned host memory makes copies to or from this device asynchronous."""
    return bool(torch.device(device).type == "cuda")


def accelerator_words(device: str) -> str:
    """Returns name and compute capability of a GPU, as far as its library reports them."""
    torch_device = torch.device(device)
    if torch_device.type != "cuda":
        return str(torch_device.type)
    gpu = torch.cuda.get_device_properties(torch_device)
    return f"{gpu.name} ({gpu.major}.{gpu.minor})"


def accelerator_uuids(device: str, count: int) -> list[str]:
    """Returns the UUIDs of ``count`` GPUs: of ``device`` alone, or of the first ones."""
    if not device.startswith("cuda"):
        return []
    indices = range(min(count, torch.cuda.device_count()))
    first = int(device.partition(":")[2] or 0) if count == 1 else 0
    return [str(torch.cuda.get_device_properties(first + index).uuid) for index in indices]


def _instruction_sets() -> tuple[str, ...]:
    return tuple(name for name in INSTRUCTION_SETS if name in processor_flags())


def _cpu_name() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# Other properties of a machine: NUMA nodes, disks, network cards, limits.
#
# All are read from Linux's files: sysfs (kernel documentation, admin-guide/abi), /proc, and control
# groups of version 2 and 1 (admin-guide/cgroup-v2). On other systems, and if a container hides the
# files, lists are empty and values None. ``root`` is the root folder of these files; tests pass a
# copy from another machine.

FILE_SYSTEMS = frozenset(  # kinds of file systems that can hold a run
    {*("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "nfs", "nfs4")}
    | {*("lustre", "ceph", "cifs", "smb3", "fuse.sshfs", "9p", "virtiofs", "gpfs", "beegfs")}
)
SMALLEST = 256 * 2**20  # bytes of the smallest file system that is listed
ESCAPED = re.compile(r"\\([0-7]{3})")  # octal escape of a character in a mount's path (proc(5))
HUGE = 1 << 62  # bytes; control groups 1 report larger limits if there is none
DOWN = ("down", "lowerlayerdown", "notpresent")  # values of an inactive card's operstate
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class NumaNode:
    """One memory controller and the processors near it."""

    number: int
    cpus: str  # in the kernel's format: 0-15,32-47
    memory_bytes: int | None
    distances: tuple[int, ...]  # relative access times of each node's memory; 10 is its own


@dataclass(frozen=True)
class Mount:
    """A mounted file system that could hold a run."""

    path: str
    kind: str
    device: str
    size_bytes: int
    free_bytes: int
    spins: bool | None  # True: a hard disk with platters; None: unknown, or not a local disk


@dataclass(frozen=True)
class NetworkCard:
    """An active network interface, or an RDMA device."""

    name: str
    kind: str  # ethernet, wireless, virtual, infiniband, roce
    bits_per_second: float | None
    driver: str | None
    numa_node: int | None


@dataclass(frozen=True)
class SystemLimits:
    """Limits of a container or a service manager for this process; None: no limit."""

    cpus: float | None
    memory_bytes: int | None
    swap_bytes: int | None
    processes: int | None
    shared_memory_bytes: int | None  # size of /dev/shm, which data loader workers use
    open_files: int | None
    container: str | None  # docker, podman, kubernetes ... if known


def numa_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """Returns the machine's nodes; most machines have one."""
    nodes = []
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=_number_at_end):
        memory = None
        for line in _read(path / "meminfo").splitlines():
            if "MemTotal:" in line:
                memory = int(line.split()[-2]) * 1024
        distances = tuple(int(word) for word in _read(path / "distance").split())
        nodes.append(NumaNode(_number_at_end(path), _read(path / "cpulist"), memory, distances))
    return nodes


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Returns file systems that could hold a run, each device once, with its shortest path."""
    by_device: dict[str, Mount] = {}
    for line in _read(root / "proc/self/mounts").splitlines():
        device, path, kind = (*line.split(" "), "", "", "")[:3]
        path = ESCAPED.sub(lambda match: chr(int(match[1], 8)), path)
        if kind not in FILE_SYSTEMS or path.startswith(("/proc", "/sys", "/etc/")):
            continue
        if device in by_device and len(by_device[device].path) <= len(path) and kind != "tmpfs":
            continue
        try:
            size = os.statvfs(root / path.lstrip("/"))
        except OSError:  # a mount that doesn't answer
            continue
        total = size.f_frsize * size.f_blocks
        if total >= SMALLEST:
            key = path if kind in ("tmpfs", "overlay") else device
            spins = _spins(root, device)
            free = size.f_frsize * size.f_bavail
            by_device[key] = Mount(path, kind, device, total, free, spins)
    return sorted(by_device.values(), key=lambda mount: mount.path)


def interfaces(root: Path = Path("/")) -> list[NetworkCard]:
    """Returns active network interfaces without the loopback."""
    network_cards = []
    for path in _entries(root / "sys/class/net"):
        state = path / "operstate"
        if path.name == "lo" or not state.exists() or _read(state) in DOWN:
            continue
        real = (path / "device").exists()
        kind = "wireless" if (path / "wireless").exists() else "ethernet" if real else "virtual"
        megabits = _integer(_read(path / "speed"))  # -1 if unknown, unreadable for a virtual card
        rate = megabits * 1e6 if megabits is not None and megabits > 0 else None
        network_cards.append(NetworkCard(path.name, kind, rate, _driver(path), _numa_node(path)))
    return network_cards


def rdma_devices(root: Path = Path("/")) -> list[NetworkCard]:
    """Returns devices of InfiniBand and RoCE."""
    network_cards = []
    for path in _entries(root / "sys/class/infiniband"):
        port = path / "ports" / "1"
        kind = "roce" if _read(port / "link_layer") == "Ethernet" else "infiniband"
        rate_fields = _read(port / "rate").split()  # 400 Gb/sec (4X NDR)
        rate = float(rate_fields[0]) * 1e9 if rate_fields else None
        network_cards.append(NetworkCard(path.name, kind, rate, _driver(path), _numa_node(path)))
    return network_cards


def limits(root: Path = Path("/")) -> SystemLimits:
    """Returns the limits of this process."""
    shared_memory = open_files = None
    with contextlib.suppress(OSError):
        size = os.statvfs(root / "dev/shm")
        shared_memory = size.f_frsize * size.f_blocks
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        open_files = None if soft == resource.RLIM_INFINITY else soft
    return SystemLimits(
        cpus=_least([_cpus(group) for group in _groups(root, "cpu")]),
        memory_bytes=memory_limit(root),
        swap_bytes=_lowest_limit(root, "memory", "memory.swap.max"),
        processes=_lowest_limit(root, "pids", "pids.max"),
        shared_memory_bytes=shared_memory,
        open_files=open_files,
        container=_container(root),
    )


def memory_limit(root: Path = Path("/")) -> int | None:
    """Returns the strictest limit in bytes; None if there is none or none is reported."""
    group_limits = (
        _lowest_limit(root, "memory", f"memory.{name}") for name in ("max", "limit_in_bytes")
    )
    return _least([limit for limit in group_limits if limit is not None and limit < HUGE])


def _lowest_limit(root: Path, controller: str, file: str) -> int | None:
    return _least([_integer(_read(group / file)) for group in _groups(root, controller)])


def _groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control group and its parents, which limit it too.

    In a container the process's group appears as the root of the tree. In a job of Slurm or a
    service of systemd the group is deeper. In version 1 each controller has its own tree. A
    path with ``..`` is outside of the visible tree.
    """
    top = root / "sys/fs/cgroup"
    groups = [top, top / controller]
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        inside = Path(path.lstrip("/"))
        tree = top if number == "0" else top / controller
        if ".." in inside.parts or (number != "0" and controller not in controllers.split(",")):
            continue
        while inside.name:
            groups.append(tree / inside)
            inside = inside.parent
    return groups


def _cpus(group: Path) -> float | None:
    quota = _read(group / "cpu.max").split()
    if not quota:  # control groups 1
        quota = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    allowed, period = (_integer(word) for word in (*quota, "", "")[:2])
    return allowed / period if allowed and period and allowed > 0 else None


def _least(values: Sequence[Number | None]) -> Number | None:
    return min((value for value in values if value is not None), default=None)


def _container(root: Path) -> str | None:
    """Returns the container's runtime by the files that it creates; None if there are none."""
    for mark, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / mark).exists():
            return name
    if (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    groups = _read(root / "proc/1/cgroup")
    return next((name for name in ("docker", "kubepods", "lxc", "podman") if name in groups), None)


def _spins(root: Path, device: str) -> bool | None:
    name = device.removeprefix("/dev/")
    if name == device or "/" in name or name.startswith("vd"):  # virtio reports 1 for every disk
        return None
    for path in (
        root / "sys/class/block" / name,
        (root / "sys/class/block" / name).resolve().parent,
    ):
        text = _read(path / "queue/rotational")
        if text:
            return text == "1"
    return None


def _driver(path: Path) -> str | None:
    link = path / "device" / "driver"
    return link.resolve().name if link.exists() else None


def _numa_node(path: Path) -> int | None:
    number = _integer(_read(path / "device" / "numa_node"))
    return number if number is not None and number >= 0 else None


def _number_at_end(path: Path) -> int:
    return int("".join(c for c in path.name if c.isdigit()))


def _integer(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def processor_flags() -> frozenset[str]:
    """Returns the processor's instruction sets that ``ONEDNN_MAX_CPU_ISA`` allows (Linux)."""
    excluded_prefixes = isa_limit().excludes
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            names = line.split(":", 1)[1].split()
            return frozenset(name for name in names if not name.startswith(excluded_prefixes))
    return frozenset()


@functools.cache
def doubles_bf16() -> bool:
    """Returns True if AVX512-BF16 multiplies twice as many numbers in a cycle as float32.

    Measured: twice as many on AMD's Zen 4, about half as many on Intel's Emerald Rapids.
    """
    with contextlib.suppress(OSError):
        return "avx512_bf16" in processor_flags() and "AuthenticAMD" in CPU_INFO.read_text()
    return False


@dataclass(frozen=True)
class IsaLimit:
    """The highest instruction set that a processor's kernels may use."""

    compiler_flags: tuple[str, ...]
    excludes: tuple[str, ...]  # prefixes of the instruction sets that are not allowed


def isa_limit() -> IsaLimit:
    """Returns the limit from oneDNN's variable, which hasten's own kernels obey as well.

    Values: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
    """
    return _ISA_LIMITS.get(isa_variable().upper(), _NO_LIMIT)


_NO_LIMIT = IsaLimit(("-march=native",), ())
_SSE = IsaLimit(("-march=x86-64-v2",), ("avx", "fma", "f16c", "amx"))
_AVX = IsaLimit(("-march=x86-64-v2", "-mavx"), ("avx2", "avx5", "avx_", "fma", "amx"))
_AVX2 = IsaLimit(("-march=x86-64-v3",), ("avx512", "avx_vnni", "amx"))
_AVX512 = IsaLimit(("-march=x86-64-v4",), ("avx512_bf16", "avx512_fp16", "amx"))
_ISA_LIMITS = {
    "SSE41": _SSE,
    "AVX": _AVX,
    **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), _AVX2),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), _AVX512),
    "AVX512_CORE_BF16": IsaLimit(("-march=x86-64-v4", "-mavx512bf16"), ("avx512_fp16", "amx")),
    **dict.fromkeys(
        ("AVX512_CORE_FP16", "AVX10_1_512"), IsaLimit(("-march=native", "-mno-amx-tile"), ("amx",))
    ),
}
