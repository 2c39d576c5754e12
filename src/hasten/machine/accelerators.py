"""Figures of accelerators by name: rates from data sheets, and published measurements.

Rates are dense (without sparsity), in FLOP/s; memory in bytes per second. The source is
Stas Bekman's Machine Learning Engineering, compute/accelerator/README.md
(https://github.com/stas00/ml-engineering). He collects the datasheets and the best
rates of matrix products (MAMF, the maximum achievable matmul FLOPS). Rows marked as
recalled are from memory: check them before you rely on them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hasten.errors import InputError

SOURCE = "stas00/ml-engineering, compute/accelerator"
RECALLED = "recalled, not checked against a datasheet"


# Figures of accelerators: peaks, memory and links, each row with its source.
#
# Links are in bytes per second and direction. Memory is the part that a program can use
# (``_usable``). ``reached`` is the rate of the best measured matrix product (MAMF).

USUALLY_REACHED = 0.82  # median of measured rate / peak, for devices without a measurement
WITH_ECC = ("t4", "a10", "a40", "l4", "l20", "l40s")  # error correction takes a part of their GDDR
_T, _G = 1e12, 1e9
PCIE3, PCIE4, PCIE5 = 16.0, 32.0, 64.0  # GB/s of 16 lanes in one direction


@dataclass(frozen=True)
class Device:
    """An accelerator's figures, rates in FLOP/s; 0: unsupported format, or not measured."""

    name: str
    peak16: float  # bf16, or fp16 on a device without bf16
    memory_bytes: float
    memory_rate: float
    link: float  # to its neighbours in the node, in one direction
    per_node: int = 8  # devices joined by such a link
    units: int = 108  # multiprocessors, which compute a product tile by tile
    peak8: float = 0.0
    peak4: float = 0.0
    peak32: float = 0.0  # tf32 if there is such a unit
    reached16: float = 0.0
    reached8: float = 0.0
    reached32: float = 0.0
    gloo: bool = False  # ranks use gloo, as those on processors
    source: str = SOURCE

    def __post_init__(self) -> None:
        for field in ("peak16", "memory_bytes", "memory_rate", "link"):
            if not 0 < getattr(self, field) < float("inf"):
                raise InputError(
                    f"{self.name}: {field} is {getattr(self, field)}; it must be above 0"
                )

    @property
    def best16(self) -> float:
        return self.reached16 or USUALLY_REACHED * self.peak16

    @property
    def best8(self) -> float:
        return self.reached8 or USUALLY_REACHED * self.peak8

    @property
    def best32(self) -> float:
        return self.reached32 or USUALLY_REACHED * self.own_peak32

    @property
    def own_peak32(self) -> float:
        """Returns the FLOP/s of products in 32 bits; without a listed rate, a 16th of peak16."""
        return self.peak32 or self.peak16 / 16


def _usable(name: str, memory: float) -> float:
    """Returns the bytes that a program can use of the maker's number of GB.

    These GB are mostly GiB. CUDA's published error messages report the usable GiB: 79.11 and
    79.25 of 80, 39.50 of 40, 95.02 of 96, and 23.68 of 24. For GDDR with error correction
    they are 14.75 of 16 and 44.52 of 48. No value is known for 288 GB, so these GB are taken
    as 10^9 bytes.
    """
    unit = 2**30 if memory < 288 else _G
    return memory * unit * (0.92 if name in WITH_ECC else 0.987)


def _gpu(
    name: str,
    peak16: float,
    memory: float,
    rate: float,
    link: float,
    units: int,
    *,
    per_node: int = 8,
    peak8: float = 0,
    peak4: float = 0,
    peak32: float = 0,
    reached16: float = 0,
    reached8: float = 0,
    source: str = SOURCE,
) -> Device:
    """Returns a row from a data sheet's figures: TFLOP/s, GB, TB/s, GB/s in one direction."""
    return Device(
        name=name,
        peak16=peak16 * _T,
        memory_bytes=_usable(name, memory),
        memory_rate=rate * _T,
        link=link * _G,
        per_node=per_node,
        units=units,
        peak8=peak8 * _T,
        peak4=peak4 * _T,
        peak32=peak32 * _T,
        reached16=reached16 * _T,
        reached8=reached8 * _T,
        source=source,
    )


def _a100(
    name: str, memory: float, rate: float, link: float, reached: float, source: str = SOURCE
) -> Device:
    return _gpu(name, 312, memory, rate, link, 108, peak32=156, reached16=reached, source=source)


def _hopper(
    name: str,
    memory: float,
    rate: float,
    link: float = 450,
    best: tuple[float, float] = (794.5, 1402.6),
    source: str = SOURCE,
) -> Device:
    """Returns the SXM chip of H100, H200 and H800, which differ in memory and links."""
    return _gpu(
        *(name, 989, memory, rate, link, 132),
        peak8=1979,
        peak32=494,
        reached16=best[0],
        reached8=best[1],
        source=source,
    )


def _blackwell(
    name: str,
    peak: tuple[float, float, float],
    memory: float,
    best: tuple[float, float],
    per_node: int = 8,
    source: str = SOURCE,
) -> Device:
    return _gpu(
        *(name, peak[0], memory, 8.0, 900, 148),
        per_node=per_node,
        peak8=peak[1],
        peak4=peak[2],
        peak32=peak[0] / 2,
        reached16=best[0],
        reached8=best[1],
        source=source,
    )


_FP16 = f"{RECALLED}; fp16, has no bf16"
_FP32_SUMS = f"{RECALLED}; sums in fp32"
_ALL = (
    _a100("a100-40gb", 40, 1.555, 300, 271.2, f"{SOURCE}; memory {RECALLED}"),
    _a100("a100-80gb", 80, 2.0, 300, 271.2),
    _a100("a100-pcie", 80, 1.94, PCIE4, 252.9),
    _a100("a800", 80, 2.0, 200, 271.2, RECALLED),
    _gpu("a6000", 154.8, 48, 0.768, PCIE4, 84, peak32=77.4, source=RECALLED),
    _gpu("a40", 149.7, 48, 0.696, PCIE4, 84, peak32=74.8, source=RECALLED),
    _gpu("a10", 125, 24, 0.6, PCIE4, 72, peak32=62.5, source=RECALLED),
    _gpu("l4", 121, 24, 0.3, PCIE4, 58, peak8=242, peak32=60, source=RECALLED),
    _gpu("l40s", 362, 48, 0.86, PCIE4, 142, peak8=733, peak32=183),
    _gpu("rtx3090", 71, 24, 0.936, PCIE4, 82, peak32=35.6, source=_FP32_SUMS),
    _gpu("rtx4090", 165, 24, 1.008, PCIE4, 128, peak32=82.6, source=_FP32_SUMS),
    _gpu("t4", 65, 16, 0.32, PCIE3, 40, peak32=8.1, source=_FP16),
    _gpu("v100-16gb", 125, 16, 0.9, 150, 80, peak32=15.7, source=_FP16),
    _gpu("v100-32gb", 125, 32, 0.9, 150, 80, peak32=15.7, source=_FP16),
    _gpu("h20", 148, 96, 4.0, 450, 78, peak8=296, peak32=74, source=RECALLED),
    _gpu("h100-pcie", 756, 80, 2.0, PCIE5, 114, peak8=1513, peak32=378),
    _hopper("h100-80gb", 80, 3.35),
    # Limited to 500 W instead of 700: products at (500/700)^0.4 of the rate, an estimate.
    _hopper("h100-96gb-hbm2e-500w", 96, 2.4, best=(694.0, 1226.0), source=RECALLED),
    _hopper("h200", 141, 4.8, best=(794.5, 1453.4)),
    _hopper("h800", 80, 3.35, link=200, source=RECALLED),
    _blackwell("b200", (2250, 4500, 9000), 180, (1745, 3432.5)),
    _blackwell("b300", (2250, 4500, 12600), 288, (1769, 3353.3)),
    _blackwell("gb200", (2500, 5000, 10000), 186, (1822, 3615.6), 72),
    _blackwell("gb300", (2500, 5000, 15000), 288, (1822, 3615.6), 72, f"{SOURCE}; as GB200, B300"),
    _gpu("l20", 119.5, 48, 0.864, PCIE4, 92, peak8=239, peak32=59.8, source=RECALLED),
    _gpu("gh200", 989, 96, 4.0, 450, 132, peak8=1979, peak32=494, source=RECALLED),
    # tf32 from AMD's data sheet, recalled.
    _gpu("mi300x", 1307, 192, 5.3, 448, 304, peak8=2614, peak32=653.7, reached16=668.4),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _ALL}
# Short names; clusters have the SXM variant.
_ALIASES = {"a100": "a100-80gb", "h100": "h100-80gb", "v100": "v100-32gb", "rtxa6000": "a6000"}
_ALIASES["gh200480gb"] = "gh200"  # the driver reports the processor's memory
_PLAIN_ENDS = ("", "hbm3", "hbm3e", "pcie")  # end of a driver's name, after the memory


# (pattern of the driver's name, name on the data sheet, row above); the first match decides.
# Variants with other figures (H100 NVL, H800 PCIe, laptop and smaller consumer cards) must not
# match any pattern.
_DRIVERS = (
    (r"\bGB300\b", "GB300", "gb300"),
    (r"\bGB200\b", "GB200", "gb200"),
    (r"\bB300\b", "B300", "b300"),
    (r"\bB200\b", "B200", "b200"),
    (r"\bH200$|\bH200 SXM", "H200", "h200"),
    (r"\bH100 PCIe", "H100 PCIe", "h100-pcie"),
    (r"\bH100 (80GB HBM3|SXM)", "H100 SXM", "h100-80gb"),
    (r"\bH800$|\bH800 SXM", "H800", "h800"),
    (r"\bH20$|\bH20 SXM", "H20", "h20"),
    (r"\bA800-SXM", "A800", "a800"),
    (r"\bA100-SXM4-40GB", "A100 40GB", "a100-40gb"),
    (r"\bA100-SXM4-80GB", "A100 80GB", "a100-80gb"),
    (r"\bA100 80GB PCIe", "A100 PCIe", "a100-pcie"),
    (r"\bL40S\b", "L40S", "l40s"),
    (r"\bA40$", "A40", "a40"),
    (r"\bRTX A6000$", "RTX A6000", "a6000"),
    (r"\bRTX 4090$", "RTX 4090", "rtx4090"),
    (r"\bV100-SXM\d-32GB", "V100 32GB", "v100-32gb"),
    (r"\bMI300X\b", "MI300X", "mi300x"),
)


def datasheet(driver_name: str) -> Device | None:
    """Returns the figures of a device by its driver's name (``NVIDIA H100 80GB HBM3``), or None."""
    for pattern, name, row in _DRIVERS:
        if re.search(pattern, driver_name.strip(), re.IGNORECASE):
            return replace(DEVICES[row], name=name)
    return None


def device(name: str) -> Device:
    """Returns the preset of that name in any spelling (``H100 80GB``, ``a100_80gb``).

    Raises:
        InputError: the name is unknown; the message lists similar names.
    """
    plain = _plain(name)
    by_plain = {_plain(key): value for key, value in DEVICES.items()}
    preset = by_plain.get(_plain(_ALIASES.get(plain, name))) or _of_memory(name, by_plain)
    if preset is not None:
        return preset
    near = difflib.get_close_matches(plain, [*by_plain, *_ALIASES], n=3, cutoff=0.5)
    names = [by_plain[n].name if n in by_plain else n for n in near] or list(DEVICES)
    raise InputError(
        f"no figures are known of the device {name!r}: give its peak16, memory_bytes, memory_rate "
        f"and link, or take one of {', '.join(names)}"
    )


def _of_memory(name: str, by_plain: Mapping[str, Device]) -> Device | None:
    """Returns the device of a name that contains its memory, such as ``A100 80GB PCIe``."""
    match = re.fullmatch(r"(.*?)[-_ ](\d+) ?gb(.*)", name.strip().lower())
    if match is None or _plain(match[3]) not in _PLAIN_ENDS:
        return None
    family, wired = _plain(match[1]), "pcie" * ("pcie" in match[3])
    keys = [family + wired] if wired else [family, f"{family}{match[2]}gb"]
    chips = [by_plain[key] for key in keys if key in by_plain]
    return next((c for c in chips if abs(float(match[2]) * _G / c.memory_bytes - 1) < 0.1), None)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|[^a-z0-9]", "", name.lower())
