"""GPUs as NVIDIA's driver sees them: what they are, how they are linked, and how they do just now.

NVML is asked through its C library (NVML API reference, "Device Queries" and "NvLink Methods"), so
that no package is needed; what a driver or a virtual GPU doesn't tell is None. Utilisation is the
share of the driver's last sampling period in which any kernel ran: a busy GPU may still do little.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
MOST_LINKS = 18  # NVML_NVLINK_MAX_LINKS
SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU
TEXT = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and the like
# nvmlGpuTopologyLevel_t: what lies between two GPUs, and the name that nvidia-smi gives it.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment; None: the driver doesn't say."""

    utilisation: float | None  # 0 to 1
    memory_used_bytes: int | None
    temperature: float | None  # degrees Celsius
    power_watts: float | None


@dataclass(frozen=True)
class Description:
    """What one GPU is."""

    name: str
    uuid: str
    memory_bytes: int | None
    capability: str | None
    power_limit_watts: float | None
    pcie: str | None  # generation and lanes now, and the most
    nvlinks: int  # links that are up
    mig: bool | None


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    """The GPUs of this machine, or those with the given UUIDs; none where there is no driver."""

    def __init__(self, uuids: Sequence[str] | None = None, library: Any = None) -> None:
        self._library = _open() if library is None else library
        self._handles: list[ctypes.c_void_p] = []
        if self._library is None or self._library.nvmlInit_v2():
            return
        if uuids is None:
            count = self._number("nvmlDeviceGetCount_v2") or 0
            found = [self._handle("nvmlDeviceGetHandleByIndex_v2", i) for i in range(count)]
        else:
            names = [u if u.startswith(("GPU-", "MIG-")) else f"GPU-{u}" for u in uuids]
            found = [self._handle("nvmlDeviceGetHandleByUUID", n.encode()) for n in names]
        self._handles = [handle for handle in found if handle is not None]

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def driver(self) -> str | None:
        """The driver's version."""
        if not self._handles:
            return None
        buffer = ctypes.create_string_buffer(TEXT)
        wrong = self._library.nvmlSystemGetDriverVersion(buffer, TEXT)
        return None if wrong else buffer.value.decode(errors="replace")

    def readings(self) -> list[GpuReading]:
        """All GPUs now."""
        return [self._reading(handle) for handle in self._handles]

    def descriptions(self) -> list[Description]:
        """What the GPUs are."""
        return [self._description(handle) for handle in self._handles]

    def paths(self) -> list[list[str]]:
        """What lies between each two GPUs, in nvidia-smi's words; empty for a single one."""
        if len(self) < 2:
            return []
        return [[self._path(one, other) for other in self._handles] for one in self._handles]

    def _reading(self, handle: ctypes.c_void_p) -> GpuReading:
        use, memory = _Utilisation(), _Memory()
        used = self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
        held = self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        milliwatts = self._number("nvmlDeviceGetPowerUsage", handle)
        return GpuReading(
            use.gpu / 100 if used else None,
            memory.used if held else None,
            self._number("nvmlDeviceGetTemperature", handle, SENSOR_GPU),
            None if milliwatts is None else milliwatts / 1e3,
        )

    def _description(self, handle: ctypes.c_void_p) -> Description:
        memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
        held = self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        pointers = (ctypes.byref(major), ctypes.byref(minor))
        capable = self._ask("nvmlDeviceGetCudaComputeCapability", handle, *pointers)
        states = (self._number("nvmlDeviceGetNvLinkState", handle, k) for k in range(MOST_LINKS))
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit", handle)
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        pointers = (ctypes.byref(mode), ctypes.byref(pending))
        split = self._ask("nvmlDeviceGetMigMode", handle, *pointers)
        return Description(
            name=self._text("nvmlDeviceGetName", handle),
            uuid=self._text("nvmlDeviceGetUUID", handle),
            memory_bytes=memory.total if held else None,
            capability=f"{major.value}.{minor.value}" if capable else None,
            power_limit_watts=None if limit is None else limit / 1e3,
            pcie=self._pcie(handle),
            nvlinks=sum(state == 1 for state in states),
            mig=bool(mode.value) if split else None,
        )

    def _pcie(self, handle: ctypes.c_void_p) -> str | None:
        now = [
            self._number(f"nvmlDeviceGetCurrPcieLink{w}", handle) for w in ("Generation", "Width")
        ]
        most = [
            self._number(f"nvmlDeviceGetMaxPcieLink{w}", handle) for w in ("Generation", "Width")
        ]
        if None in (*now, *most):
            return None
        text = f"PCIe {now[0]}.0 x{now[1]}"
        return text if now == most else f"{text} (at most {most[0]}.0 x{most[1]})"

    def _path(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> str:
        if one is other:
            return "-"
        level = self._number("nvmlDeviceGetTopologyCommonAncestor", one, other)
        return LEVELS.get(level, "?") if level is not None else "?"

    def _handle(self, function: str, key: int | bytes) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        return handle if self._ask(function, key, ctypes.byref(handle)) else None

    def _text(self, function: str, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(TEXT)
        return (
            buffer.value.decode(errors="replace")
            if self._ask(function, handle, buffer, TEXT)
            else ""
        )

    def _number(self, function: str, *arguments: Any) -> int | None:
        """What NVML writes behind the arguments."""
        value = ctypes.c_uint()
        return value.value if self._ask(function, *arguments, ctypes.byref(value)) else None

    def _ask(self, function: str, *arguments: Any) -> bool:
        """Whether the driver knows the function and answered it."""
        known = getattr(self._library, function, None)
        return known is not None and known(*arguments) == 0


def _open() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None
