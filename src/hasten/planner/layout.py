"""Which rank holds which part, as numbers: one ``Layout``, or many as columns of ``Layouts``.

A layout says nothing of speed. Words are coded as their place in the tuples below, so that a
hundred thousand layouts are a few arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "dualpipe", "zb2p")
RECOMPUTE = ("none", "selective", "full", "light")  # see ``activations``
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32")
COMPRESSIONS = ("none", "int8", "int4", "topk1")  # of gradients between ranks
TASKS = ("pretrain", "full", "lora")
Column = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """What is trained: tokens per sequence, sequences per step, and how many tokens in all."""

    sequence: int
    global_batch: int
    task: str = "pretrain"
    tokens: float = 0.0

    def __post_init__(self) -> None:
        for field in ("sequence", "global_batch"):
            if getattr(self, field) < 1:
                raise InputError(f"job: {field} is {getattr(self, field)}; give 1 at least")
        if not 0 <= self.tokens < float("inf"):
            raise InputError(f"job: tokens is {self.tokens}; give how many in all, or 0: unsaid")
        if self.task not in TASKS:
            raise InputError(f"job: task is {self.task!r}; it must be one of {', '.join(TASKS)}")


@dataclass(frozen=True)
class Layout:
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
        for name in ("dp", "tp", "pp", "ep", "cp", "micro_batch", "virtual"):
            if getattr(self, name) < 1:
                raise InputError(f"layout: {name} is {getattr(self, name)}; give 1 at least")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"layout: zero is {self.zero}; it must be 0, 1, 2 or 3")
        for name, known in _WORDS.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"layout: {name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(known)}"
                )
        if self.virtual > 1 and self.schedule != "interleaved":
            raise InputError(
                f"layout: {self.virtual} virtual stages need the schedule 'interleaved', not "
                f"{self.schedule!r}"
            )

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


_WORDS = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "precision": PRECISIONS,
    "compression": COMPRESSIONS,
}


@dataclass(frozen=True)
class Layouts:
    """Columns, one row per layout, named as the fields of ``Layout``; words as codes."""

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

    def __post_init__(self) -> None:
        if len({getattr(self, field.name).shape for field in fields(self)}) != 1:
            raise ValueError("the columns of layouts differ in length")

    def __len__(self) -> int:
        return len(self.dp)

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> Layouts:
        """The columns of these layouts, in order."""
        rows = list(layouts)
        return cls(**{f.name: _column([getattr(r, f.name) for r in rows], f.name) for f in _FIELDS})

    def at(self, row: int) -> Layout:
        """One row as a Layout again."""
        values: dict[str, Any] = {f.name: int(getattr(self, f.name)[row]) for f in _FIELDS}
        values |= {name: words[values[name]] for name, words in _WORDS.items()}
        values |= {name: bool(values[name]) for name in ("sequence_parallel", "flash")}
        return Layout(**values)

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Layouts:
        """The rows chosen by a mask or by their numbers."""
        return Layouts(**{f.name: getattr(self, f.name)[np.asarray(rows)] for f in _FIELDS})

    @property
    def devices(self) -> Column:
        return self.dp * self.tp * self.pp * self.cp


_FIELDS = fields(Layout)


def _column(values: Sequence[Any], name: str) -> Column:
    words = _WORDS.get(name)
    coded = [words.index(value) for value in values] if words else values
    return np.asarray(coded, dtype=np.float64)
