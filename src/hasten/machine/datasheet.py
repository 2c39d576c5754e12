"""What the makers of GPUs promise, and what others reached: figures by the device's name.

Rates are dense (without sparsity), in FLOP/s; memory in bytes per second. The figures are those of
Stas Bekman's Machine Learning Engineering, compute/accelerator/README.md
(https://github.com/stas00/ml-engineering), where he collects the datasheets and what matrix
products reach at best (MAMF, the maximum achievable matmul FLOPS), unless a row is marked recalled:
those stand here from memory and want checking before anybody relies on them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SOURCE = "stas00/ml-engineering, compute/accelerator"
RECALLED = "recalled, not checked against a datasheet"
_TERA = 1e12


@dataclass(frozen=True)
class Datasheet:
    """A device's promised rates; ``bf16`` is fp16's where a device has no bf16.

    ``reached`` is the best bf16 product that others measured, None where nobody is known to have.
    """

    name: str
    bf16: float
    fp8: float | None
    memory: float
    reached: float | None
    source: str


def _row(
    name: str,
    bf16: float,
    memory: float,
    fp8: float | None = None,
    reached: float | None = None,
    source: str = SOURCE,
) -> Datasheet:
    """A row from figures in TFLOP/s and TB/s, as datasheets give them."""
    return Datasheet(
        name,
        bf16 * _TERA,
        fp8 and fp8 * _TERA,
        memory * _TERA,
        reached and reached * _TERA,
        source,
    )


# How the driver spells a device -> its row; the first pattern that is found decides. Variants with
# other figures (H100 NVL, H800 PCIe, laptops' and trimmed consumer cards) must match nothing.
_DEVICES: tuple[tuple[str, Datasheet], ...] = (
    (r"\bGB300\b", _row("GB300", 2500, 8.0, fp8=5000, source=f"{SOURCE}; memory as B300")),
    (r"\bGB200\b", _row("GB200", 2500, 8.0, fp8=5000, reached=1822)),
    (r"\bB300\b", _row("B300", 2250, 8.0, fp8=4500, reached=1769)),
    (r"\bB200\b", _row("B200", 2250, 8.0, fp8=4500, reached=1745)),
    (r"\bH200$|\bH200 SXM", _row("H200", 989, 4.8, fp8=1979, reached=794.5)),
    (r"\bH100 PCIe", _row("H100 PCIe", 756, 2.0, fp8=1513)),
    (r"\bH100 (80GB HBM3|SXM)", _row("H100 SXM", 989, 3.35, fp8=1979, reached=794.5)),
    (r"\bH800$|\bH800 SXM", _row("H800", 989, 3.35, fp8=1979, source=RECALLED)),
    (r"\bH20$|\bH20 SXM", _row("H20", 148, 4.0, fp8=296, source=RECALLED)),
    (r"\bA800-SXM", _row("A800", 312, 2.0, source=RECALLED)),
    (
        r"\bA100-SXM4-40GB",
        _row("A100 40GB", 312, 1.555, reached=271.2, source=f"{SOURCE}; memory {RECALLED}"),
    ),
    (r"\bA100-SXM4-80GB", _row("A100 80GB", 312, 2.0, reached=271.2)),
    (r"\bA100 80GB PCIe", _row("A100 PCIe", 312, 1.94, reached=252.9)),
    (r"\bL40S\b", _row("L40S", 362, 0.86, fp8=733)),
    (r"\bA40$", _row("A40", 149.7, 0.696, source=RECALLED)),
    (r"\bRTX A6000$", _row("RTX A6000", 154.8, 0.768, source=RECALLED)),
    (
        r"\bRTX 4090$",
        _row("RTX 4090", 165, 1.008, source=f"{RECALLED}; with sums in fp32"),
    ),
    (r"\bV100-SXM\d-32GB", _row("V100 32GB", 125, 0.9, source=f"{RECALLED}; fp16, has no bf16")),
    (r"\bMI300X\b", _row("MI300X", 1307, 5.3, fp8=2614, reached=668.4)),
)


def datasheet(device_name: str) -> Datasheet | None:
    """The row of a device as its driver names it (``NVIDIA H100 80GB HBM3``), or None."""
    for pattern, row in _DEVICES:
        if re.search(pattern, device_name.strip(), re.IGNORECASE):
            return row
    return None
