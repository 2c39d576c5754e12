"""Energy counters of GPUs, read by NVML; or the reason why there is none.

  1. The function `open_meter` finds the counters of the training devices and reads them
     once.
  2. The method `read` returns the joules since then; `source` names the counters and
     what they include.

Nothing is estimated. NVML counts millijoules of one GPU since its driver was loaded
(from Volta on: nvmlDeviceGetTotalEnergyConsumption). The count is of everything that
ran on the GPU, not of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hasten.core.context import JobContext
from hasten.machine import environment, gpu, host

JOULES_PER_KWH = 3.6e6
Joules = Callable[[], float]


@dataclass
class EnergyMeter:
    """Joules since the meter was opened, over all of its counters; None once one of them failed."""

    source: str
    counters: Sequence[Joules] = ()
    _lost: bool = field(default=False, init=False)

    def read(self) -> float | None:
        """Joules so far."""
        if not self.counters or self._lost:
            return None
        try:
            return sum(counter() for counter in self.counters)
        except OSError as error:
            self._lost, self.source = True, f"not measured: the counter failed ({error})"
            return None

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


def open_meter(device: str, uuids: Sequence[str] = ()) -> EnergyMeter:
    """The meter of a training device; without counters, ``source`` contains the reason.

    Args:
        device: ``cpu``, or the GPU's name in torch.
        uuids: UUIDs of the GPUs that train, with or without the prefix ``GPU-``.
    """
    if device.startswith("cpu"):
        return EnergyMeter("not measured: only GPUs have a counter that is read")
    try:
        return _nvml(uuids)
    except OSError as error:
        return EnergyMeter(f"not measured: {error}")


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
