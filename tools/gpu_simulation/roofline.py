"""Seconds that a device allows for a call: the longest of computing, moving and launching.

The rates are those of `hasten.machine.accelerators`, as far as well-made kernels reach them.
Nothing here was measured on a device: a time is a lower bound, tokens per second an upper one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hasten.errors import InputError
from hasten.machine.accelerators import DEVICES, Device, device

Figure = TypeVar("Figure")
HALF, FP8, SINGLE, ATTENTION = "half", "fp8", "single", "attention"  # units that multiply
MEMORY_SHARE = 0.9  # of the datasheet's rate, in a long copy
# FlashAttention-2 reaches 50 to 73 % of an A100's peak (arXiv:2307.08691, section 4.1); on Hopper,
# whose own instructions it doesn't use, 35 to 40 % (arXiv:2407.08608, section 1).
ATTENTION_SHARE = {8: 0.6, 9: 0.38, 10: 0.38}
LAUNCH_SECONDS = 2.5e-6  # of the smallest kernel and the gap before it, in a full queue
HOST_CALL_SECONDS = 6e-6  # Python, autograd and the launch of an operator
HOST_VIEW_SECONDS = 2e-6  # of an operator that launches nothing
# Compute capability by the beginning of a device's name; Triton's kernels want 8.0 or later.
CAPABILITIES: dict[str, tuple[int, int]] = {
    "v100": (7, 0),
    "t4": (7, 5),
    **dict.fromkeys(("a100", "a800"), (8, 0)),
    **dict.fromkeys(("a6000", "a40", "a10", "rtx3090"), (8, 6)),
    **dict.fromkeys(("l40s", "l4", "l20", "rtx4090"), (8, 9)),
    **dict.fromkeys(("h20", "h100", "h200", "h800", "gh200"), (9, 0)),
    **dict.fromkeys(("b200", "gb200"), (10, 0)),
    **dict.fromkeys(("b300", "gb300"), (10, 3)),
}
# FLOP/s of products in float32 outside of tensor cores, which torch takes unless it is told
# otherwise. From datasheets, recalled; of others a sixteenth of the peak in half formats.
SINGLE_FLOPS = {
    **dict.fromkeys(("a100", "a800"), 19.5e12),
    **dict.fromkeys(("h100", "h200", "h800", "gh200"), 67e12),
    "h20": 44e12,
    "h100-pcie": 51e12,
    "a6000": 38.7e12,
    "a40": 37.4e12,
    "a10": 31.2e12,
    "l4": 30.3e12,
    "l40s": 91.6e12,
    "l20": 59.8e12,
    "rtx3090": 35.6e12,
    "rtx4090": 82.6e12,
    **dict.fromkeys(("b200", "b300"), 75e12),
    **dict.fromkeys(("gb200", "gb300"), 80e12),
}


class CallCost(NamedTuple):
    """The cost of a call; ``unit`` is the hardware unit that bounds its FLOP/s."""

    launches: int = 0
    bytes: int = 0
    flops: float = 0.0
    unit: str = HALF


@dataclass(frozen=True)
class SimulatedDevice:
    """A device by its figures: rates in FLOP/s and bytes/s that kernels reach, memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    memory_rate: float
    rates: dict[str, float]  # by unit
    peak: float  # FLOP/s of the datasheet in half formats, which MFU refers to
    units: int
    source: str

    def seconds(self, cost: CallCost) -> float:
        """The least time of a call."""
        return max(
            cost.flops / self.rates[cost.unit],
            cost.bytes / self.memory_rate,
            LAUNCH_SECONDS * cost.launches,
        )


def simulated_device(name: str) -> SimulatedDevice:
    """The device of that name, as `hasten estimate --gpu` spells it.

    Raises:
        InputError: no figures are known of it, or it is none of NVIDIA's.
    """
    sheet = device(name)
    capability = _of(sheet, CAPABILITIES)
    if capability is None:
        supported = ", ".join(d for d in DEVICES if _of(DEVICES[d], CAPABILITIES))
        raise InputError(
            f"no step can be traced for {sheet.name}: by simulation there are {supported}"
        )
    half = sheet.best16
    rates = {
        HALF: half,
        FP8: sheet.best8 or half,
        SINGLE: _of(sheet, SINGLE_FLOPS) or sheet.peak16 / 16,
        ATTENTION: ATTENTION_SHARE.get(capability[0], ATTENTION_SHARE[8]) * sheet.peak16,
    }
    return SimulatedDevice(
        name=sheet.name,
        capability=capability,
        memory_bytes=int(sheet.memory_bytes),
        memory_rate=MEMORY_SHARE * sheet.memory_rate,
        rates=rates,
        peak=sheet.peak16,
        units=sheet.units,
        source=sheet.source,
    )


def _of(sheet: Device, table: Mapping[str, Figure]) -> Figure | None:
    """The entry of the longest beginning of the device's name."""
    names = [name for name in table if sheet.name == name or sheet.name.startswith(f"{name}-")]
    return table[max(names, key=len)] if names else None
