"""GPU kernels that this process doesn't use, because a check found that they don't work here.

Each has something that runs in its place; whoever chooses between the two asks here. What is
refused holds for the whole process, as the GPU and its driver do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs: what Triton and FlashAttention-2 run on

_reasons: dict[str, str] = {}


def refuse(kernel: str, reason: str) -> None:
    """Do without a kernel from now on."""
    _reasons[kernel] = reason


def allow_all() -> None:
    """Use every kernel again."""
    _reasons.clear()


def is_refused(kernel: str) -> bool:
    """Whether something else has to run in the kernel's place."""
    return kernel in _reasons


def reasons() -> Mapping[str, str]:
    """Why, by kernel."""
    return MappingProxyType(_reasons)
