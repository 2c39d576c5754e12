"""Operators of a profiled step by own time, sorted into families that a person can act on.

A name decides the family, the first pattern that matches wins. Own time is what an operator spent
outside the operators it called, so families add up. Kernels of hasten's own are called from
functions of autograd and are found under those functions' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OTHER = "other"
FAMILIES: tuple[tuple[str, str], ...] = (
    ("communication", r"c10d|gloo|nccl|all_?reduce|all_?gather|reduce_scatter|all_?to_?all"),
    ("communication", r"broadcast_|barrier"),
    ("optimizer", r"Optimizer|adam|sgd|muon|lerp|addcmul|addcdiv|_foreach"),
    ("loss and head", r"log_?softmax|nll_?loss|cross_?entropy|logsumexp"),
    ("attention", r"attention|attend|flash|sdpa|softmax"),
    ("products", r"(^|[^a-z])(add|b|addb|ba)?mm_?\b|_mm\b|gemm|matmul|grouped_mm|MmBackward"),
    ("products", r"linear|addmv|::mv|::dot|product|experts|joined|einsum|mkldnn|cutlass|xmma"),
    ("copies", r"copy|::to\b|clone|contiguous|::cat\b|memcpy|memset|::empty|::zero|::fill"),
    ("copies", r"index|gather|scatter|embedding|::stack|select_backward|slice_backward|::sort"),
    ("copies", r"pin_memory|::new_|repeat|::pad|resize"),
    ("norm and elementwise", r"norm|swiglu|silu|gelu|relu|sigmoid|rotate|rotary|dropout|tanh"),
    ("norm and elementwise", r"::(mul|add|sub|div|neg|pow|rsqrt|sqrt|exp|log|sin|cos)_?\b"),
    ("norm and elementwise", r"::(mean|sum|where|masked\w*|eq|ne|lt|le|gt|ge|bitwise\w*)_?\b"),
    ("norm and elementwise", r"::(clamp\w*|cumsum|max|min|abs)_?\b|elementwise|reduce_kernel"),
    ("norm and elementwise", r"(Mul|Add|Sub|Div|Neg)Backward"),
)
_COMPILED = [(family, re.compile(pattern, re.IGNORECASE)) for family, pattern in FAMILIES]


@dataclass(frozen=True)
class Operator:
    """One row of the profiler: own seconds of all its calls on the device that did the work."""

    name: str
    seconds: float
    calls: int

    @property
    def family(self) -> str:
        return family_of(self.name)


def family_of(name: str) -> str:
    """The family that an operator's, function's or kernel's name puts it into."""
    return next((family for family, pattern in _COMPILED if pattern.search(name)), OTHER)


def operators(averages: Iterable[Any], on_gpu: bool) -> list[Operator]:
    """The profiler's averages as rows with time, the longest first.

    On a GPU these are its kernels; a step there waits for them and not for the host's operators.
    """
    rows = []
    for event in averages:
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent > 0 and not event.key.startswith("ProfilerStep"):
            rows.append(Operator(str(event.key), spent / 1e6, int(event.count)))
    return sorted(rows, key=lambda row: -row.seconds)


def table(rows: list[Operator], step_seconds: float, count: int = 15) -> dict[str, Any]:
    """Families and the longest operators with their shares of all operators' own time.

    ``outside_seconds`` is the part of the profiled step in which no operator ran: Python, waiting,
    and code that the profiler doesn't see; None where several threads or streams overlapped.
    """
    whole = sum(row.seconds for row in rows)
    families: dict[str, list[Operator]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    found = [
        {
            "family": family,
            "seconds": sum(row.seconds for row in members),
            "share": sum(row.seconds for row in members) / whole,
            "calls": sum(row.calls for row in members),
        }
        for family, members in families.items()
    ]
    outside = step_seconds - whole
    return {
        "seconds": whole,
        "outside_seconds": outside if outside >= 0 else None,
        "families": sorted(found, key=lambda row: -row["seconds"]),
        "top": [
            {**asdict(row), "family": row.family, "share": row.seconds / whole}
            for row in rows[:count]
        ],
    }
