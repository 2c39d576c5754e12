"""GPUs as NVIDIA's driver reports them, and ``monitor_performance``, which prints their load.

NVML is read through NVIDIA's package `nvidia-ml-py`. Values that a driver or a virtual
GPU doesn't report are None. Utilisation is the share of the driver's last sampling
period in which any kernel ran: a busy GPU may still do little.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import psutil

from hasten.errors import require_real

# nvmlGpuTopologyLevel_t: the connection between two GPUs, with the name in nvidia-smi.
LEVELS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
NO_LIBRARY = "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"


class DriverError(OSError):
    """NVIDIA's driver is missing or doesn't answer; the message contains the reason."""


@dataclass(frozen=True)
class GpuReading:
    """The state of one GPU at one moment; None: the driver doesn't report it."""

    utilisation: float | None  # 0 to 1
    memory_used_bytes: int | None
    temperature: float | None  # degrees Celsius
    power_watts: float | None


@dataclass(frozen=True)
class Description:
    """Properties of one GPU."""

    name: str
    uuid: str
    memory_bytes: int | None
    capability: str | None
    power_limit_watts: float | None
    pcie: str | None  # current generation and lanes; the largest if they differ
    nvlinks: int  # active links
    mig: bool | None


def ask(function: str, *arguments: Any) -> Any:
    """Returns the result of an NVML function; raises DriverError."""
    import pynvml

    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError_LibraryNotFound as error:
        raise DriverError(NO_LIBRARY) from error
    except pynvml.NVMLError as error:
        raise DriverError(f"{function}: {error}") from error


def by_uuid(uuid: str) -> Any:
    """Returns NVML's handle of a GPU by its UUID, with or without ``GPU-``; raises DriverError."""
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return ask("nvmlDeviceGetHandleByUUID", name)


def _ask_or_none(function: str, *arguments: Any) -> Any:
    """Returns the result of an NVML function; None if the driver doesn't report it."""
    try:
        return ask(function, *arguments)
    except DriverError:
        return None


class Gpus:
    """The GPUs of this machine, or those with the given UUIDs; none without a driver."""

    def __init__(self, uuids: Sequence[str] | None = None) -> None:
        self._handles: list[Any] = []
        try:
            ask("nvmlInit")
            count = ask("nvmlDeviceGetCount")
        except DriverError:
            return
        for key in range(count) if uuids is None else uuids:
            with contextlib.suppress(DriverError):
                self._handles.append(
                    by_uuid(key) if isinstance(key, str) else ask("nvmlDeviceGetHandleByIndex", key)
                )

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def driver(self) -> str | None:
        """Returns the driver's version."""
        return _ask_or_none("nvmlSystemGetDriverVersion") if self._handles else None

    def readings(self) -> list[GpuReading]:
        """Returns the present state of all GPUs."""
        return [self._reading(handle) for handle in self._handles]

    def descriptions(self) -> list[Description]:
        """Returns the properties of the GPUs."""
        return [self._description(number) for number in range(len(self))]

    def paths(self) -> list[list[str]]:
        """Returns a matrix of nvidia-smi's names for the path between GPUs; empty for one GPU."""
        if len(self) < 2:
            return []

        def path(one: Any, other: Any) -> str:
            level = _ask_or_none("nvmlDeviceGetTopologyCommonAncestor", one, other)
            return "-" if one is other else LEVELS.get(level, "?")

        return [[path(one, other) for other in self._handles] for one in self._handles]

    def nvlinks(self, number: int) -> int:
        """Returns the number of active NVLinks of a GPU."""
        from pynvml import NVML_NVLINK_MAX_LINKS as MOST

        handle = self._handles[number]
        return sum(
            _ask_or_none("nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MOST)
        )

    def pcie(self, number: int, which: str = "Max") -> tuple[int | None, int | None]:
        """Returns PCIe generation and lanes of a GPU: the largest or, by ``Curr``, the current."""
        handle, name = self._handles[number], f"nvmlDeviceGet{which}PcieLink"
        return _ask_or_none(f"{name}Generation", handle), _ask_or_none(f"{name}Width", handle)

    def _reading(self, handle: Any) -> GpuReading:
        use = _ask_or_none("nvmlDeviceGetUtilizationRates", handle)
        memory = _ask_or_none("nvmlDeviceGetMemoryInfo", handle)
        return GpuReading(
            use and use.gpu / 100,
            memory and memory.used,
            _ask_or_none("nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU
            _watts("nvmlDeviceGetPowerUsage", handle),
        )

    def _description(self, number: int) -> Description:
        handle = self._handles[number]
        memory = _ask_or_none("nvmlDeviceGetMemoryInfo", handle)
        capability = _ask_or_none("nvmlDeviceGetCudaComputeCapability", handle)
        mig_mode = _ask_or_none("nvmlDeviceGetMigMode", handle)  # (now, after the next reset)
        now, most = self.pcie(number, "Curr"), self.pcie(number)
        pcie = f"PCIe {now[0]}.0 x{now[1]}"
        if now != most:
            pcie += f" (at most {most[0]}.0 x{most[1]})"
        return Description(
            name=_ask_or_none("nvmlDeviceGetName", handle) or "",
            uuid=_ask_or_none("nvmlDeviceGetUUID", handle) or "",
            memory_bytes=memory and memory.total,
            capability=capability and "{}.{}".format(*capability),
            power_limit_watts=_watts("nvmlDeviceGetEnforcedPowerLimit", handle),
            pcie=None if None in (*now, *most) else pcie,
            nvlinks=self.nvlinks(number),
            mig=mig_mode and bool(mig_mode[0]),
        )


def _watts(function: str, handle: Any) -> float | None:
    milliwatts = _ask_or_none(function, handle)
    return None if milliwatts is None else milliwatts / 1e3


SHORTEST_SECONDS = 0.05  # shortest interval between two printed lines


def monitor_performance(
    interval: float = 1, seconds: float | None = None, file: TextIO | None = None
) -> None:
    """Prints utilisation, memory and temperature per interval, mean ± deviation over GPUs.

    Without a GPU it prints the processor's. It ends after ``seconds``, or with Ctrl-C. In a
    daemon thread (``threading.Thread(target=monitor_performance, daemon=True)``) it ends with
    the program.

    Args:
        interval: seconds between two lines.
        file: receives the lines; default: standard output.

    Raises:
        ValueError: the interval is too short.
    """
    require_real(interval=interval, seconds=0 if seconds is None else seconds)
    if interval < SHORTEST_SECONDS:
        raise ValueError(f"interval is {interval:g} s; give {SHORTEST_SECONDS:g} s at least")
    gpus = Gpus()
    totals = [one.memory_bytes for one in gpus.descriptions()]
    psutil.cpu_percent()  # the first result covers no time
    ends = None if seconds is None else time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            remaining = interval if ends is None else min(interval, ends - time.monotonic())
            if remaining <= 0:
                return
            time.sleep(remaining)
            if len(gpus):
                line = _gpu_line(gpus, totals)
            else:
                has_sensors = hasattr(psutil, "sensors_temperatures")  # not on every system
                sensors = psutil.sensors_temperatures() if has_sensors else {}
                warm = [one.current for some in sensors.values() for one in some if one.current]
                line = (
                    f"CPU utilisation: {psutil.cpu_percent():.1f}% | memory: "
                    f"{psutil.virtual_memory().percent:.1f}% | temperature: {_spread(warm, '°C')}"
                )
            print(line, file=file, flush=True)


def _gpu_line(gpus: Gpus, totals: Sequence[int | None]) -> str:
    readings = gpus.readings()
    used = [
        100 * one.memory_used_bytes / total
        for one, total in zip(readings, totals, strict=True)
        if one.memory_used_bytes is not None and total
    ]
    busy = [100 * one.utilisation for one in readings if one.utilisation is not None]
    temperatures = [one.temperature for one in readings if one.temperature is not None]
    return (
        f"GPU utilisation: {_spread(busy, '%')} | memory: {_spread(used, '%')} | "
        f"temperature: {_spread(temperatures, '°C')}"
    )


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "not known"
    mean = f"{statistics.fmean(values):.1f}{unit}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.pstdev(values):.1f}"
