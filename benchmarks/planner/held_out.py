"""How far off the cost model is on measurements that its fit hasn't seen, and the fits to them.

Grouped cross-validation: rows of one group (software, model, device) are near-duplicates, so whole
groups are left out, never rows. With as many folds as groups each group is predicted by a fit of
all others; a stack that has one group only is then one that the fit has never met.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from published import PublishedMeasurement, read_record

from hasten.errors import InputError
from hasten.foreign_files import LARGEST_JSON, parse_json, read_bounded
from hasten.planner.layout import Column, Layouts, PlannedLayout
from hasten.planner.memory import MemoryColumns
from hasten.planner.memory import memory as rank_memory
from hasten.planner.numbers import (
    Constants,
    MachineNumbers,
    MemoryConstants,
    ModelNumbers,
    machine,
    numbers,
    prior,
)
from hasten.planner.own_runs import fit
from hasten.planner.predict import steps

NOISE = 0.05  # of the logarithm of seconds: releases of one framework differ by 5.5 %
MEMORY_NOISE = 0.06
OLDER = 0.2  # weight of rows that a later release of the software has replaced
N = TypeVar("N", ModelNumbers, MachineNumbers)


def stacked(cases: Sequence[N]) -> N:
    """Many cases as one, an array in each field; a matrix's figures become (slots, rows)."""
    columns = {
        f.name: np.stack([np.asarray(getattr(case, f.name)) for case in cases], axis=-1)
        for f in fields(cases[0])
    }
    return type(cases[0])(**columns)


DENSE, MOE = ("core",), ("moe",)
TRAINED = ("core", "trend", "moe", "finetune", "ratio")
SINGLE_STEP_NOISE = 1.03  # a pair of layouts counts as different beyond the noise of single steps
INTERVAL = (0.1, 0.9)


def read_records(path: Path) -> list[PublishedMeasurement]:
    """All records of the file that say enough to be predicted.

    Raises:
        InputError: it isn't such a file; the sentence names the record.
    """
    rows = parse_json(read_bounded(path, LARGEST_JSON, "list of measurements"), str(path))
    if not isinstance(rows, list):
        raise InputError(f"{path} must hold a list of measurements")
    found = []
    for place, row in enumerate(rows):
        try:
            record = read_record(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            name = row.get("id", place) if isinstance(row, Mapping) else place
            lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{path}: record {name} can't be used: {lacks}") from error
        if record is not None:
            found.append(record)
    if not found:
        raise InputError(f"{path} holds no measurement whose layout is fully known")
    return found


@dataclass(frozen=True)
class PublishedConstants(Constants):
    """With the rates of products in formats that are published and that the trainer lacks."""

    gemm8_blocks: float = prior(0.6, 0.2)  # of the best 8-bit product, a scale per block (mxfp8)
    gemm4: float = prior(0.35, 0.3)  # of the 4-bit peak (nvfp4)


@dataclass(frozen=True)
class Cases:
    """Records as columns."""

    records: tuple[PublishedMeasurement, ...]
    model: ModelNumbers
    machine: MachineNumbers
    layouts: Layouts
    batch: Column
    lora: Column

    @classmethod
    def of(cls, records: Sequence[PublishedMeasurement]) -> Cases:
        return cls(
            tuple(records),
            stacked([numbers(r.architecture, r.job.sequence) for r in records]),
            stacked([machine(r.cluster) for r in records]),
            Layouts.of([r.layout for r in records]),
            np.array([float(r.job.global_batch) for r in records]),
            np.array([float(r.job.task == "lora") for r in records]),
        )

    def seconds(self, c: PublishedConstants) -> Column:
        """Predicted seconds per step, without any stack's factor.

        Another format is fp8 on a device with that format's rate of products.
        """
        formats = np.array([r.other_format for r in self.records])
        eight = self.machine.best8
        rate = np.where(formats == "mxfp8", eight * c.gemm8_blocks / c.gemm8, eight)
        rate = np.where(formats == "nvfp4", self.machine.peak4 * c.gemm4 / c.gemm8, rate)
        machines = replace(self.machine, best8=rate)
        return steps(self.model, machines, self.layouts, self.batch, c, self.lora).total

    def memory(self, c: MemoryConstants) -> MemoryColumns:
        """Predicted resident bytes of the fullest rank, by part."""
        count = np.maximum(1.0, np.ceil(self.batch / (self.layouts.dp * self.layouts.micro_batch)))
        return rank_memory(self.model, self.layouts, count, c, self.lora)

    def bytes(self, c: MemoryConstants) -> Column:
        """All of them together."""
        return self.memory(c).total

    def measured_seconds(self) -> Column:
        """Seconds per step as measured."""
        rates = np.array([r.tokens_per_second or np.nan for r in self.records])
        return np.asarray(self.batch * self.model.sequence / (rates * self.layouts.devices))


def weights(records: Sequence[PublishedMeasurement]) -> Column:
    """How much each row counts: near-duplicates of a group share, recalled figures count little."""
    size: dict[str, int] = {}
    for record in records:
        size[record.group] = size.get(record.group, 0) + 1
    return np.array(
        [
            r.confidence**2
            * (0.25 if r.recalled else 1.0)
            * (OLDER if r.superseded else 1.0)
            / size[r.group] ** 0.5
            for r in records
        ]
    )


def fit_seconds(
    cases: Cases, start: PublishedConstants | None = None
) -> tuple[PublishedConstants, dict[str, float]]:
    """Constants and the stacks' factors from measured seconds."""
    names = sorted({r.stack for r in cases.records})
    place = np.array([names.index(r.stack) for r in cases.records])
    one_hot = (place[:, None] == np.arange(len(names))[None, :]).astype(np.float64)
    target = np.log(cases.measured_seconds())
    found, stacks = fit(
        start or PublishedConstants(),
        lambda c: np.log(cases.seconds(c)),
        target,
        weights(cases.records),
        NOISE,
        one_hot,
        at_once=True,
    )
    return found, {name: float(np.exp(value)) for name, value in zip(names, stacks, strict=True)}


def fit_memory(cases: Cases, start: MemoryConstants | None = None) -> MemoryConstants:
    """Memory's constants from measured gigabytes."""
    target = np.log(np.array([(r.memory_gb or np.nan) * 1e9 for r in cases.records]))
    nothing = np.zeros((len(target), 0))
    found, _ = fit(
        start or MemoryConstants(),
        lambda c: np.log(cases.bytes(c)),
        target,
        weights(cases.records),
        MEMORY_NOISE,
        nothing,
    )
    return found


@dataclass(frozen=True)
class HeldOut:
    """Records and ln(measured / predicted) of each, predicted without its group."""

    records: tuple[PublishedMeasurement, ...]
    errors: Column
    groups: int
    known: NDArray[np.bool_]  # another group of its stack was in the fit

    def chosen(self, scopes: Sequence[str], newest: bool = False) -> NDArray[np.bool_]:
        """The rows of these scopes, without superseded ones if asked."""
        return np.array(
            [r.scope in scopes and not (newest and r.superseded) for r in self.records], dtype=bool
        )


def timed(records: Sequence[PublishedMeasurement]) -> list[PublishedMeasurement]:
    """The records that tell how long a step took."""
    return [r for r in records if r.tokens_per_second and r.scope in TRAINED]


def weighed(records: Sequence[PublishedMeasurement]) -> list[PublishedMeasurement]:
    """The records that tell how much memory was taken."""
    return [r for r in records if r.memory_gb]


def seconds(
    records: Sequence[PublishedMeasurement], folds: int | None = None, by_stack: bool = False
) -> HeldOut:
    """Held-out errors of seconds per step, in ``folds`` folds of groups (all groups by default).

    ``by_stack`` leaves out whole software stacks instead.
    """
    return _held_out(timed(records), folds, _time_errors, by_stack)


def memory(records: Sequence[PublishedMeasurement], folds: int | None = None) -> HeldOut:
    """The same of resident bytes."""
    return _held_out(weighed(records), folds, _memory_errors)


def _held_out(
    records: Sequence[PublishedMeasurement],
    folds: int | None,
    errors_of: Callable[[Sequence[PublishedMeasurement], Sequence[PublishedMeasurement]], Column],
    by_stack: bool = False,
) -> HeldOut:
    names = [r.stack if by_stack else r.group for r in records]
    groups = sorted(set(names))
    count = max(2, min(folds or len(groups), len(groups)))
    fold_of = {group: place % count for place, group in enumerate(groups)}
    fold = np.array([fold_of[name] for name in names])
    errors = np.full(len(records), np.nan)
    known = np.zeros(len(records), dtype=bool)
    for number in range(count):
        inside = [r for r, f in zip(records, fold, strict=True) if f != number]
        outside = [r for r, f in zip(records, fold, strict=True) if f == number]
        if not outside:
            continue
        stacks = {r.stack for r in inside}
        errors[fold == number] = errors_of(inside, outside)
        known[fold == number] = [r.stack in stacks for r in outside]
    return HeldOut(tuple(records), errors, len(groups), known)


def _time_errors(
    inside: Sequence[PublishedMeasurement], outside: Sequence[PublishedMeasurement]
) -> Column:
    constants, stacks = fit_seconds(Cases.of(inside))
    return time_errors(outside, constants, stacks)


def time_errors(
    records: Sequence[PublishedMeasurement], constants: PublishedConstants, stacks: dict[str, float]
) -> Column:
    """ln(measured / predicted) seconds."""
    cases = Cases.of(records)
    factor = np.array([stacks.get(r.stack, 1.0) for r in records])
    return np.asarray(np.log(cases.measured_seconds() / (cases.seconds(constants) * factor)))


def _memory_errors(
    inside: Sequence[PublishedMeasurement], outside: Sequence[PublishedMeasurement]
) -> Column:
    return memory_errors(outside, fit_memory(Cases.of(inside)))


def memory_errors(records: Sequence[PublishedMeasurement], constants: MemoryConstants) -> Column:
    """ln(measured / predicted) bytes."""
    measured = np.array([(r.memory_gb or np.nan) * 1e9 for r in records])
    return np.log(measured / Cases.of(records).bytes(constants))


def off(errors: Column) -> Column:
    """Relative errors, |predicted / measured - 1|, from ln(predicted / measured).

    Of rates these are the errors of seconds; of bytes they have to be turned round.
    """
    return np.abs(np.expm1(errors))


def by_stack(found: HeldOut, rows: NDArray[np.bool_]) -> dict[str, tuple[float, int, int]]:
    """Per stack: median error, rows, groups."""
    summary = {}
    for stack in sorted({r.stack for r, used in zip(found.records, rows, strict=True) if used}):
        mine = rows & np.array([r.stack == stack for r in found.records])
        groups = {r.group for r, used in zip(found.records, mine, strict=True) if used}
        summary[stack] = (float(np.median(off(found.errors[mine]))), int(mine.sum()), len(groups))
    return summary


def quantiles(errors: Column, weights: Column | None = None) -> tuple[float, float]:
    """The interval's ends: 10 % and 90 %, a little outwards where rows are few (conformal)."""
    order = np.argsort(errors)
    share = np.ones(len(errors)) if weights is None else weights[order]
    n = float(share.sum() ** 2 / (share**2).sum())  # rows that the weighted ones are worth
    place = (np.cumsum(share) - share / 2) / share.sum()
    low = max(0.0, INTERVAL[0] - 0.9 / (n + 1))
    ends = np.interp([low, 1 - low], place, errors[order])
    return float(ends[0]), float(ends[1])


def spreads(
    found: HeldOut, new: HeldOut, held_memory: HeldOut, constants: MemoryConstants
) -> dict[str, tuple[float, float]]:
    """Intervals by kind of prediction: of groups held out, and of whole stacks (``new``).

    A new stack's interval spans 0 and is never narrower than a known one's; stacks count alike,
    however many rows they published.
    """
    named = {}
    for kind, scopes in (("dense", DENSE), ("moe", MOE)):
        rows = found.chosen(scopes, newest=True)
        low, high = quantiles(found.errors[rows & found.known])
        named[kind] = (min(low, 0.0), max(high, 0.0))
        rows = new.chosen(scopes, newest=True)
        stacks = [r.stack for r, used in zip(new.records, rows, strict=True) if used]
        share = np.array([1 / stacks.count(stack) for stack in stacks])
        far, wide = quantiles(new.errors[rows], share)
        named[f"{kind}_new_stack"] = (min(low, far, 0.0), max(high, wide, 0.0))
    named["memory"] = quantiles(in_doubts(held_memory, constants).errors)
    return named


def in_doubts(found: HeldOut, constants: MemoryConstants) -> HeldOut:
    """Errors of memory in units of each record's doubt."""
    doubt = Cases.of(found.records).memory(constants).doubt
    return replace(found, errors=found.errors / doubt)


def coverage(found: HeldOut, rows: NDArray[np.bool_]) -> float:
    """Share of rows within an interval made of the other groups' errors."""
    groups = np.array([r.group for r in found.records])
    inside = []
    for group in sorted(set(groups[rows])):
        mine = rows & (groups == group)
        low, high = quantiles(found.errors[rows & ~mine])
        inside += list((found.errors[mine] >= low) & (found.errors[mine] <= high))
    return float(np.mean(inside))


@dataclass(frozen=True)
class HeldOutChoice:
    """How well layouts were chosen: regret of each sweep, pairs put in the right order."""

    regrets: tuple[float, ...]
    right: int
    pairs: int

    @property
    def concordance(self) -> float:
        return self.right / max(self.pairs, 1)


def choice(found: HeldOut, stack: str, noise: float = SINGLE_STEP_NOISE) -> HeldOutChoice:
    """Of sweeps of one model over layouts on the same devices: regret and concordance.

    Repeats of a layout count as their median. A pair counts where it differs beyond the noise.
    """
    sweeps: dict[tuple[object, ...], dict[PlannedLayout, list[tuple[float, float]]]] = {}
    for record, error in zip(found.records, found.errors, strict=True):
        if record.stack != stack or not record.tokens_per_second:
            continue
        batch = round(4 * math.log2(record.job.global_batch))
        key = (record.architecture, record.cluster.devices, record.job.sequence, batch)
        rate = record.tokens_per_second
        rows = sweeps.setdefault(key, {}).setdefault(record.layout, [])
        rows.append((rate, rate * math.exp(float(error))))
    regrets, right, pairs = [], 0, 0
    for layouts in sweeps.values():
        medians = [tuple(np.median(np.array(rows), axis=0)) for rows in layouts.values()]
        if len(medians) < 2:
            continue
        chosen = max(medians, key=lambda m: m[1])
        regrets.append(max(m[0] for m in medians) / chosen[0] - 1)
        for one, other in itertools.combinations(medians, 2):
            if max(one[0], other[0]) / min(one[0], other[0]) > noise:
                pairs += 1
                right += (one[0] > other[0]) == (one[1] > other[1])
    return HeldOutChoice(tuple(float(r) for r in regrets), right, pairs)
