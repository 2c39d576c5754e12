"""Energy counters: GPUs by NVML, processors by RAPL; or the reason why there is none.

  1. The function `open_meter` finds the counters of the training device and reads them
     once.
  2. The method `read` returns the joules since then; `source` names the counters and
     what they include.

Nothing is estimated. NVML counts millijoules of one GPU since its driver was loaded
(from Volta on: nvmlDeviceGetTotalEnergyConsumption). RAPL counts microjoules of a
processor package, and of its memory if that has a separate counter. It restarts at
``max_energy_range_uj`` (Linux, Documentation/power/powercap/powercap.rst). Since 2020
only root may read RAPL (CVE-2020-8694), and most virtual machines have no such counter.
Both count everything that ran on the device, not one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.core.context import JobContext
from hasten.machine import environment, gpu, host

POWERCAP = Path("/sys/class/powercap")
MOST_WATTS = 1000.0  # of one package: a counter not read for longer may have turned over twice
JOULES_PER_KWH = 3.6e6
Joules = Callable[[], float | None]


@dataclass
class EnergyMeter:
    """Joules since the meter was opened, over all of its counters; None once one of them failed."""

    source: str
    counters: Sequence[Joules] = ()
    _lost: bool = field(default=False, init=False)

    def read(self) -> float | None:
        """Joules so far. With RAPL read it every minute or so: its counters are short."""
        joules = self.reading()
        if joules is None and self.counters and not self._lost:
            self._lost, self.source = True, "not measured: the counter was read too seldom"
        return joules

    def reading(self) -> float | None:
        """A count of joules, for the difference of two; None after a gap that may hide a turnover.

        What comes after the gap is counted again, so a turn doesn't need to know what was before.
        """
        if not self.counters or self._lost:
            return None
        try:
            values = [counter() for counter in self.counters]
        except OSError as error:
            self._lost, self.source = True, f"not measured: the counter failed ({error})"
            return None
        readings = [value for value in values if value is not None]
        return sum(readings) if len(readings) == len(values) else None

    def note(self, moment: object) -> None:
        """Read, so that no counter turns over unseen; for callbacks."""
        self.read()

    def totals(self) -> dict[str, Any]:
        """``kwh`` so far, None where they aren't known, and their ``source``."""
        joules = self.read()
        kwh = None if joules is None else joules / JOULES_PER_KWH
        return {"kwh": kwh, "source": self.source}


def meter_of_run(context: JobContext) -> EnergyMeter:
    """The meter of all devices that train, where all of them are on this machine."""
    if environment.ranks_here(context.world) < context.world.size:
        return EnergyMeter("not measured: the ranks are on several machines")
    return open_meter(context.device, host.accelerator_uuids(context.device, context.world.size))


def open_meter(device: str, uuids: Sequence[str] = (), powercap: Path = POWERCAP) -> EnergyMeter:
    """The meter of a training device; without counters, ``source`` contains the reason.

    Args:
        device: ``cpu``, or the GPU's name in torch.
        uuids: UUIDs of the GPUs that train, with or without the prefix ``GPU-``.
        powercap: folder of RAPL's counters in Linux.
    """
    try:
        if device.startswith("cpu"):
            return _rapl(powercap)
        return _nvml(uuids)
    except OSError as error:
        return EnergyMeter(f"not measured: {error}")


class RaplCounter:
    """One zone's joules, across the turnovers of its counter.

    Args:
        zone: a folder with ``energy_uj`` and ``max_energy_range_uj``.
        clock: seconds, for knowing whether two turnovers are possible since the last reading.
    """

    def __init__(self, zone: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = zone / "energy_uj", clock
        self._range = _number(zone / "max_energy_range_uj")
        self._last, self._at, self._sum = _number(self._file), clock(), 0.0

    def __call__(self) -> float | None:
        now, at = _number(self._file), self._clock()
        step, gap = now - self._last, at - self._at
        self._last, self._at = now, at
        if gap * MOST_WATTS * 1e6 > self._range:
            return None
        self._sum += step if step >= 0 else step + self._range
        return self._sum / 1e6


def _rapl(powercap: Path) -> EnergyMeter:
    """Packages, and memory where it's a zone of its own; ``psys`` would count packages twice."""
    zones = {zone: _text(zone / "name") for zone in sorted(powercap.glob("intel-rapl:*"))}
    zones = {z: name for z, name in zones.items() if name.startswith("package") or name == "dram"}
    if not zones:
        raise OSError(f"no RAPL counter under {powercap}")
    source = f"RAPL ({', '.join(zones.values())}): all that ran on the processor"
    return EnergyMeter(source, [RaplCounter(zone) for zone in zones])


def _number(path: Path) -> int:
    text = _text(path)
    try:
        return int(text)
    except ValueError as error:
        raise OSError(f"{path} holds {text[:40]!r}, not a count") from error


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        hint = "; its owner is root" if isinstance(error, PermissionError) else ""
        raise OSError(f"{path}: {error.strerror or error}{hint}") from error


def _nvml(uuids: Sequence[str]) -> EnergyMeter:
    if not uuids:
        raise OSError("which GPUs train is not known")
    gpu.ask("nvmlInit")

    def joules(handle: Any) -> float:
        return float(gpu.ask("nvmlDeviceGetTotalEnergyConsumption", handle)) / 1e3

    def counter(handle: Any) -> Joules:
        first = joules(handle)
        return lambda: joules(handle) - first

    counters = [counter(gpu.by_uuid(uuid)) for uuid in uuids]
    count = f"{len(counters)} GPU" + ("s" if len(counters) > 1 else "")
    return EnergyMeter(f"NVML ({count}): the accelerators alone, all that ran on them", counters)
