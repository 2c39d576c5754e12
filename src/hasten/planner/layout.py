"""Layouts of a job on ranks, as numbers.

One layout is a ``PlannedLayout``; many are columns of ``Layouts``. Words are coded as
their index in the tuples below, so that a hundred thousand layouts are a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError

# zb2p and context parallelism are other software's: they are predicted, but not proposed.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb2p")
GPIPE, INTERLEAVED, ZERO_BUBBLE, ZB2P = (
    SCHEDULES.index(s) for s in ("gpipe", "interleaved", "zero_bubble", "zb2p")
)
RECOMPUTE = ("none", "selective", "full", "light")  # see ``memory``
PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
COMPRESSIONS = ("none", "int8", "int4", "topk1")  # compression of gradients between ranks
TASKS = ("pretrain", "full", "lora")
FP8, FP32 = (PRECISIONS.index(p) for p in ("fp8", "fp32"))
SELECTIVE, FULL, LIGHT = (RECOMPUTE.index(r) for r in ("selective", "full", "light"))
Column = NDArray[np.float64]


@dataclass(frozen=True)
class PlannedJob:
    """A training job: tokens per sequence, sequences per step, and the total of tokens."""

    sequence: int
    global_batch: int
    task: str = "pretrain"
    tokens: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sequence", "global_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"job: {name} is {getattr(self, name)}; give at least 1")
        if not 0 <= self.tokens < float("inf"):
            raise InputError(f"job: tokens is {self.tokens}; give the total, or 0 if unknown")
        if self.task not in TASKS:
            raise InputError(f"job: task is {self.task!r}; it must be one of {', '.join(TASKS)}")


@dataclass(frozen=True)
class PlannedLayout:
    """One layout; ``flash`` and ``sequence_parallel`` are on in today's software."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    zero: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: str = "none"
    precision: str = "bf16"
    compression: str = "none"
    sequence_parallel: bool = True
    flash: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"layout: {name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(choices)}"
                )

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


_CHOICES = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "precision": PRECISIONS,
    "compression": COMPRESSIONS,
}


@dataclass(frozen=True)
class Layouts:
    """Columns, one row per layout, named as the fields of ``PlannedLayout``; words as codes."""

    dp: Column
    tp: Column
    pp: Column
    ep: Column
    cp: Column
    zero: Column
    micro_batch: Column
    schedule: Column
    virtual: Column
    recompute: Column
    precision: Column
    compression: Column
    sequence_parallel: Column
    flash: Column

    def __len__(self) -> int:
        return len(self.dp)

    @classmethod
    def of(cls, layouts: Iterable[PlannedLayout]) -> Layouts:
        """Returns the columns of these layouts, in order."""
        rows = list(layouts)
        columns: dict[str, Column] = {}
        for name in (f.name for f in _FIELDS):
            values = [getattr(row, name) for row in rows]
            coded = [_CHOICES[name].index(word) for word in values] if name in _CHOICES else values
            columns[name] = np.asarray(coded, dtype=np.float64)
        return cls(**columns)

    def at(self, row: int) -> PlannedLayout:
        """Returns a row as a layout."""
        values: dict[str, Any] = {f.name: int(getattr(self, f.name)[row]) for f in _FIELDS}
        values |= {name: choices[values[name]] for name, choices in _CHOICES.items()}
        values |= {name: bool(values[name]) for name in ("sequence_parallel", "flash")}
        return PlannedLayout(**values)

    @property
    def devices(self) -> Column:
        return self.dp * self.tp * self.pp * self.cp


_FIELDS = fields(PlannedLayout)


def layout_text(layout: PlannedLayout) -> str:
    """Returns a layout as text: the settings that differ from one device without options."""
    parts = [f"{name}={getattr(layout, name)}" for name in ("dp", "tp", "pp", "ep", "cp")]
    parts = [s for s in parts if not s.endswith("=1")] or ["dp=1"]
    if layout.dp * layout.cp > 1:
        parts.append(f"zero={layout.zero}")
    parts.append(f"micro={layout.micro_batch}")
    if layout.pp > 1:
        deep = f"x{layout.virtual}" if layout.virtual > 1 else ""
        parts.append(f"{layout.schedule}{deep}")
    if layout.recompute != "none":
        parts.append(f"recompute={layout.recompute}")
    if layout.precision not in ("bf16", "fp16"):
        parts.append(layout.precision)
    if layout.compression != "none":
        parts.append(f"gradients={layout.compression}")
    return " ".join(parts)
