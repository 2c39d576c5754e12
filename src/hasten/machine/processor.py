"""The processor's instruction sets, and the limit that the user sets to them."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from pathlib import Path

from hasten.machine.environment import isa_variable

CPU_INFO = Path("/proc/cpuinfo")


@functools.cache
def processor_flags() -> frozenset[str]:
    """Instruction sets that ``ONEDNN_MAX_CPU_ISA`` allows; empty if the system reports none."""
    above = isa_limit().excludes
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            names = line.split(":", 1)[1].split()
            return frozenset(name for name in names if not name.startswith(above))
    return frozenset()


@functools.cache
def doubles_bf16() -> bool:
    """Returns True if AVX512-BF16 multiplies twice as many numbers in a cycle as float32.

    Measured: on AMD's Zen 4 it does; on Intel's Emerald Rapids it multiplies about half as many.
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
    """Returns the limit that oneDNN's variable sets for torch's products, for other kernels too.

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
