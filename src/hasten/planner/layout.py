"""Layouts as numbers: the parts of each rank, and every possible layout of a job.

One layout is a ``PlannedLayout``; many are columns of ``Layouts``. A layout contains no
speed. Words are coded as their index in the tuples below, so a hundred thousand layouts
are a few arrays.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError
from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "dualpipe", "zb2p")
SIMULATED = ("gpipe", "1f1b", "interleaved", "zb1p", "dualpipe")
GPIPE, INTERLEAVED, ZB1P, ZB2P, DUALPIPE = (
    SCHEDULES.index(s) for s in ("gpipe", "interleaved", "zb1p", "zb2p", "dualpipe")
)
RECOMPUTE = ("none", "selective", "full", "light")  # see ``memory``
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32")
COMPRESSIONS = ("none", "int8", "int4", "topk1")  # of gradients between ranks
TASKS = ("pretrain", "full", "lora")
FP8, MXFP8, NVFP4, FP32 = (PRECISIONS.index(p) for p in ("fp8", "mxfp8", "nvfp4", "fp32"))
SELECTIVE, FULL, LIGHT = (RECOMPUTE.index(r) for r in ("selective", "full", "light"))
Column = NDArray[np.float64]
Deal = tuple[int, int, int, int, int]  # dp, tp, pp, ep, cp


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
                raise InputError(f"job: {name} is {getattr(self, name)}; give 1 at least")
        if not 0 <= self.tokens < float("inf"):
            raise InputError(f"job: tokens is {self.tokens}; give how many in all, or 0: unsaid")
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
        for name in ("dp", "tp", "pp", "ep", "cp", "micro_batch", "virtual"):
            if getattr(self, name) < 1:
                raise InputError(f"layout: {name} is {getattr(self, name)}; give 1 at least")
        if self.zero not in (0, 1, 2, 3):
            raise InputError(f"layout: zero is {self.zero}; it must be 0, 1, 2 or 3")
        for name, choices in _WORDS.items():
            if getattr(self, name) not in choices:
                raise InputError(
                    f"layout: {name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(choices)}"
                )
        if self.virtual > 1 and self.schedule != "interleaved":
            raise InputError(
                f"layout: {self.virtual} virtual stages need the schedule 'interleaved', not "
                f"{self.schedule!r}"
            )

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def deal(self) -> Deal:
        """The division of the devices."""
        return self.dp, self.tp, self.pp, self.ep, self.cp


_WORDS = {
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

    def __post_init__(self) -> None:
        if len({getattr(self, field.name).shape for field in fields(self)}) != 1:
            raise ValueError("the columns of layouts differ in length")

    def __len__(self) -> int:
        return len(self.dp)

    @classmethod
    def of(cls, layouts: Iterable[PlannedLayout]) -> Layouts:
        """The columns of these layouts, in order."""
        rows = list(layouts)
        columns: dict[str, Column] = {}
        for name in (f.name for f in _FIELDS):
            values = [getattr(row, name) for row in rows]
            coded = [_WORDS[name].index(value) for value in values] if name in _WORDS else values
            columns[name] = np.asarray(coded, dtype=np.float64)
        return cls(**columns)

    def at(self, row: int) -> PlannedLayout:
        """One row as a Layout again."""
        values: dict[str, Any] = {f.name: int(getattr(self, f.name)[row]) for f in _FIELDS}
        values |= {name: choices[values[name]] for name, choices in _WORDS.items()}
        values |= {name: bool(values[name]) for name in ("sequence_parallel", "flash")}
        return PlannedLayout(**values)

    def take(self, rows: NDArray[Any] | Sequence[int]) -> Layouts:
        """The rows chosen by a mask or by their numbers."""
        return Layouts(**{f.name: getattr(self, f.name)[np.asarray(rows)] for f in _FIELDS})

    @property
    def devices(self) -> Column:
        return self.dp * self.tp * self.pp * self.cp


_FIELDS = fields(PlannedLayout)


def why_impossible(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> str:
    """Why there is no such schedule, in one sentence; empty where there is one."""
    P, M = stages, micro_batches
    if schedule not in SIMULATED:
        return f"no order is known of the schedule {schedule!r}: take one of {', '.join(SIMULATED)}"
    if P < 1 or M < 1 or virtual < 1:
        return f"a pipeline of {P} stages and {M} micro-batches: give 1 of each at least"
    if schedule == "interleaved" and M % P:
        return f"interleaved stages need micro-batches in multiples of {P} (stages), not {M}"
    if schedule != "interleaved" and virtual > 1:
        return f"{virtual} virtual stages need the schedule 'interleaved', not {schedule!r}"
    if schedule == "dualpipe" and (P % 2 or M % 2 or M < 2 * P):
        return (
            f"DualPipe needs an even number of stages and an even number of micro-batches, twice "
            f"as many as stages at least; there are {P} stages and {M} micro-batches"
        )
    return ""


# Every layout that a job could have on a cluster, within the rules of divisibility.
#
#   1. how devices are dealt out: tensor x context x pipeline x data parallel, experts over them
#   2. for each: micro-batch, ZeRO stage, schedule, recomputation, number format, compression
#
# What the rules leave out is counted by rule, so that nobody wonders where a layout has gone.

LEAST_TOKENS = 2048  # of a sequence that one rank of context parallelism is left with
MOST_TOKENS = 131_072  # of one micro-batch; larger ones gain nothing
ONLY_FP16 = ("v100", "t4")  # devices without bf16


@dataclass(frozen=True)
class LayoutSpace:
    """The choices that may vary; few bits and compression only if asked for: other mathematics."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    schedules: tuple[str, ...] = SIMULATED
    recompute: tuple[str, ...] = ()  # all words where left out, ``light`` only with experts
    precisions: tuple[str, ...] = ()  # the device's own 16 bits where left out
    compressions: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {"schedules": SIMULATED, "recompute": RECOMPUTE}
        allowed |= {"compressions": COMPRESSIONS, "precisions": PRECISIONS}
        for name, choices in allowed.items():
            for word in getattr(self, name):
                if word not in choices:
                    raise InputError(f"{name}: {word!r} isn't one of {', '.join(choices)}")
        if not set(self.zero) <= {0, 1, 2, 3}:
            raise InputError(f"zero: {self.zero} has other stages than 0, 1, 2 and 3")

    @classmethod
    def everything(cls, cluster: Cluster) -> LayoutSpace:
        """With the formats that the device has, and with compressed gradients."""
        formats = ["fp8"] if has_format(cluster, "fp8") else []
        formats += ["mxfp8", "nvfp4"] if has_format(cluster, "nvfp4") else []
        return cls(precisions=(own_format(cluster), *formats), compressions=COMPRESSIONS)


@dataclass(frozen=True)
class EnumeratedLayouts:
    """The layouts, and how many ways to deal out devices each rule has refused."""

    layouts: Layouts
    refused: Mapping[str, int] = field(default_factory=dict)


def own_format(cluster: Cluster) -> str:
    """bf16, or fp16 on devices that have no bf16."""
    return "fp16" if cluster.device.name.startswith(ONLY_FP16) else "bf16"


def has_format(cluster: Cluster, precision: str) -> bool:
    """Returns True if the devices have a unit for products in a format; 16 and 32 bits all have."""
    chip = cluster.device
    return {"fp8": chip.peak8, "mxfp8": chip.peak8, "nvfp4": chip.peak4}.get(precision, 1.0) > 0


def enumerate_layouts(
    model: Architecture, cluster: Cluster, job: PlannedJob, space: LayoutSpace | None = None
) -> EnumeratedLayouts:
    """All layouts that the rules allow, as columns.

    Raises:
        InputError: the devices have no unit for the formats that were asked for.
    """
    space = space or LayoutSpace()
    refused: Counter[str] = Counter()
    rows: list[tuple[int, ...]] = []
    formats = space.precisions or (own_format(cluster),)
    usable = [name for name in formats if has_format(cluster, name)]
    if not usable:
        raise InputError(
            f"format: {cluster.device.name} has no unit for products in {' or '.join(formats)}"
        )
    refused.update(f"format: the device has no unit for {n}" for n in formats if n not in usable)
    # Megatron Core and DeepSeek recompute norms and activation functions alone beside experts.
    usual = [word for word in RECOMPUTE if word != "light" or model.moe is not None]
    combinations = list(
        itertools.product(
            [RECOMPUTE.index(r) for r in space.recompute or usual],
            [PRECISIONS.index(p) for p in usable],
            [COMPRESSIONS.index(c) for c in space.compressions],
        )
    )
    for deal in _deals(model, cluster, job, refused):
        dp, pp, cp = deal[0], deal[2], deal[4]
        # One rank alone has nothing to shard or to compress.
        zeros = space.zero if dp * cp > 1 else space.zero[:1]
        more = (
            combinations if dp * cp > 1 else [r for r in combinations if r[2] == combinations[0][2]]
        )
        share = job.global_batch // dp
        for micro in (2**k for k in range(18)):
            if micro > max(1, MOST_TOKENS // job.sequence) or share % micro:
                continue
            ways = _schedules(space, model, pp, share // micro)
            for zero, way, others in itertools.product(zeros, ways, more):
                rows.append((*deal, zero, micro, *way, *others))
    table = np.asarray(rows, dtype=np.float64).reshape(len(rows), 12)
    columns = dict(zip((f.name for f in _FIELDS), table.T, strict=False))
    on = np.ones(len(rows))
    return EnumeratedLayouts(Layouts(**columns, sequence_parallel=on, flash=on), dict(refused))


def _deals(
    model: Architecture, cluster: Cluster, job: PlannedJob, refused: Counter[str]
) -> Iterator[Deal]:
    devices = cluster.devices
    for tp in _divisors(cluster.per_node):
        if model.heads % tp:
            refused["heads: tp doesn't divide the attention heads"] += 1
            continue
        for pp in _divisors(devices // tp) if devices % tp == 0 else ():
            if pp > model.layers:
                refused["layers: fewer layers than pipeline stages"] += 1
                continue
            most = max(1, job.sequence // LEAST_TOKENS)
            for cp in _divisors(devices // (tp * pp)):
                if cp > most or cp & (cp - 1):
                    continue
                dp = devices // (tp * pp * cp)
                if job.global_batch % dp:
                    refused["batch: the global batch isn't a multiple of dp"] += 1
                    continue
                for ep in _divisors(model.moe.count) if model.moe else (1,):
                    if dp * cp * tp % ep == 0:  # over ranks that hold the same stage
                        yield dp, tp, pp, ep, cp


def _schedules(
    space: LayoutSpace, model: Architecture, pp: int, count: int
) -> list[tuple[int, int]]:
    """(schedule, virtual stages); without stages there is nothing to schedule."""
    if pp == 1:
        return [(SCHEDULES.index("1f1b"), 1)]
    schedules = []
    for name in space.schedules:
        for virtual in (2, 3, 4, 6, 8) if name == "interleaved" else (1,):
            if pp * virtual <= model.layers and not why_impossible(name, pp, count, virtual):
                schedules.append((SCHEDULES.index(name), virtual))
    return schedules


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
