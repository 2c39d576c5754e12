"""Why a layout isn't the plan: it can't be, doesn't fit by so much, or another does better.

Every sentence has the numbers that it speaks of. ``why_not`` answers for one layout that somebody
asks about, ``rejected`` for each way to deal out the devices, by its best variant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.machine.accelerators import device
from hasten.models.architecture import Architecture
from hasten.planner.candidate import PlanCandidate, candidate, micro_batches_of
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedJob, PlannedLayout
from hasten.planner.planning import ClusterPlan, EvaluatedLayouts
from hasten.planner.predict import FATAL, REASONS, predict
from hasten.planner.schedules import SIMULATED, why_impossible
from hasten.planner.simulate import resimulated

# What a user writes on a command line, read: a layout's words, counts like 15T, changes to try.

_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHORT = {
    "micro": "micro_batch",
    "gradients": "compression",
    "vpp": "virtual",
    "mbs": "micro_batch",
}
CHANGES = ("gpu", "nodes", "gpus_per_node", "network", "link")


def count_of(text: str, what: str) -> float:
    """A number with k, M, B or T behind it.

    Raises:
        InputError: it is none, or not positive.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    value = float(found[1]) * _TIMES[found[2]] if found else 0.0
    if value <= 0 or value > 1e18:
        raise InputError(f"{what} is {text!r}; give a number such as 500M, 1B or 14.8T")
    return value


def layout_fields(words: Sequence[str]) -> dict[str, Any]:
    """``tp=8``, ``recompute=full`` ... as fields of a layout, also several in one word.

    Raises:
        InputError: a key that a layout doesn't have, or no number where one is needed.
    """
    kinds = {f.name: f.default for f in fields(PlannedLayout)}
    found: dict[str, Any] = {}
    for word in (w for text in words for w in re.split(r"[,\s]+", text) if w):
        key, equals, value = word.partition("=")
        name = _SHORT.get(key, key)
        if not equals or name not in kinds:
            raise InputError(
                f"a layout has no {word!r}{did_you_mean(key, kinds)}: write tp=8,recompute=full"
            )
        if isinstance(kinds[name], bool):
            found[name] = _switch(value, name)
        elif isinstance(kinds[name], int):
            found[name] = _whole(value, name)
        else:
            found[name] = value
    return found


def changed_cluster(cluster: Cluster, change: str) -> Cluster:
    """The cluster with ``gpu=a100``, ``nodes=8``, ``network=25`` or ``network=2x``.

    ``network`` is in Gbit/s of a device, ``link`` (within a node) in GB/s one way, or a factor.

    Raises:
        InputError: another key, or a value that can't be.
    """
    key, equals, value = change.partition("=")
    if not equals or key not in CHANGES:
        raise InputError(
            f"can't try {change!r}{did_you_mean(key, CHANGES)}: what may change is "
            f"{', '.join(CHANGES)}, written gpu=a100, nodes=8, network=25 (Gbit/s a device), "
            "network=2x, link=100 (GB/s)"
        )
    if key == "gpu":
        chip = device(value)
        own = cluster.intra == cluster.device.link
        return replace(cluster, device=chip, intra=chip.link if own else cluster.intra)
    if key == "nodes":
        return replace(cluster, nodes=_whole(value, key))
    if key == "gpus_per_node":
        return replace(cluster, per_node=_whole(value, key))
    if key == "network":
        return replace(cluster, inter=_rate(value, cluster.inter, 1e9 / 8, key))
    return replace(cluster, intra=_rate(value, cluster.intra, 1e9, key))


def _rate(value: str, now: float, unit: float, key: str) -> float:
    times = value.endswith("x")
    try:
        number = float(value.removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise InputError(f"{key} is {value!r}; give a rate above 0, or a factor such as 2x")
    return now * number if times else number * unit


def _whole(value: str, name: str) -> int:
    least = 0 if name == "zero" else 1
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        raise InputError(f"{name} is {value!r}; give a whole number, {least} at least")
    return int(value)


def _switch(value: str, name: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False}
    if value.lower() not in known:
        raise InputError(f"{name} is {value!r}; write yes or no")
    return known[value.lower()]


# Reasons.

MEMORY = 1
SAME = 0.0005  # of a step: less wouldn't be seen in what is printed
PARTS = {
    "compute": "products",
    "attention": "attention",
    "head": "head and loss",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication",
    "dp": "exposed gradient exchange",
    "pp": "pipeline bubble and uneven stages",
    "ep": "expert exchange",
    "optimizer": "optimizer",
    "other": "fixed costs",
}


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that isn't among the best, and why."""

    layout: PlannedLayout
    reason: str
    seconds: float
    fits: bool


def why_not(found: ClusterPlan, layout: PlannedLayout) -> list[str]:
    """Why that layout isn't the best of the plan, a sentence each; empty: it is."""
    model, job = found.model, found.job
    against = impossibilities(model, found.cluster, job, layout)
    if against:
        return against
    rows = Layouts.of([layout])
    told = predict(model, found.cluster, job, rows, found.calibration, found.stack)
    one = resimulated(model, candidate(told, rows, 0, found.cluster, job), job.task == "lora")
    bits = int(told.reasons[0])
    said = [too_much(one)] if bits & MEMORY else []
    said += [
        sentence.partition(": ")[2]
        for place, sentence in enumerate(REASONS)
        if bits >> place & 1 and place and FATAL >> place & 1
    ]
    best = found.best[0]
    if said or layout == best.layout:
        return said
    return [dominated(one, best)]


def impossibilities(
    model: Architecture, cluster: Cluster, job: PlannedJob, layout: PlannedLayout
) -> list[str]:
    """What numbers alone forbid, each with the nearest that would do."""
    said = []
    if layout.devices != cluster.devices:
        said.append(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} are "
            f"{layout.devices} devices, the cluster has {cluster.devices}"
        )
    share = layout.dp * layout.micro_batch
    if job.global_batch % share:
        near = max(share, round(job.global_batch / share) * share)
        said.append(
            f"a global batch of {job.global_batch} isn't a multiple of dp {layout.dp} x "
            f"micro-batch {layout.micro_batch}: {near} would be"
        )
    if model.heads % layout.tp:
        said.append(f"{model.heads} attention heads can't be shared by tp {layout.tp}")
    if layout.pp * layout.virtual > model.layers + 2:  # input and output may be stages
        said.append(
            f"{model.layers} layers can't make {layout.pp * layout.virtual} stages (pp "
            f"{layout.pp} x {layout.virtual})"
        )
    ranks = layout.dp * layout.cp * layout.tp
    experts = model.moe.count if model.moe else 1
    if layout.ep > 1 and (experts % layout.ep or ranks % layout.ep):
        said.append(
            f"ep {layout.ep} must divide the {experts} routed experts and the {ranks} ranks of a "
            "stage"
        )
    if layout.pp > 1 and layout.schedule in SIMULATED and not job.global_batch % share:
        told = why_impossible(
            layout.schedule, layout.pp, micro_batches_of(layout, job), layout.virtual
        )
        said += [told] if told else []
    return said


def too_much(one: PlanCandidate) -> str:
    """By how much it doesn't fit, and what takes the most."""
    has, needs = one.cluster.device.memory_bytes, one.memory_bytes.high
    part = max(one.memory_parts, key=one.memory_parts.__getitem__)
    return (
        f"needs {needs / 1e9:.1f} GB (P90) of {has / 1e9:.1f}, {(needs - has) / 1e9:.1f} too many; "
        f"the middle is {one.memory_bytes.middle / 1e9:.1f}, {one.memory_parts[part] / 1e9:.1f} of "
        f"it {part}"
    )


def dominated(one: PlanCandidate, best: PlanCandidate) -> str:
    """By how much another is quicker, and in which part of the step."""
    slower = one.step_seconds.middle / best.step_seconds.middle - 1
    if slower <= -SAME:
        return f"{-slower:.1%} quicker than the best that the search has played through: try it"
    if slower < SAME:
        return "as quick as the best by this prediction: either will do"
    gaps = {name: one.step_parts[name] - best.step_parts[name] for name in PARTS}
    worst = max(gaps, key=gaps.__getitem__)
    lean = one.memory_bytes.high < 0.9 * best.memory_bytes.high
    saves = (best.memory_bytes.high - one.memory_bytes.high) / 1e9
    memory = f", though it needs {saves:.1f} GB less" if lean else ""
    return (
        f"{slower:.1%} slower than the best, most of it {PARTS[worst]} "
        f"(+{gaps[worst]:.3g} s){memory}"
    )


def rejected(found: ClusterPlan, limit: int | None = None) -> list[RejectedLayout]:
    """Each way to deal out all devices that isn't among the best, the nearest to them first."""
    whole, best = found.considered[0], found.best[0]
    shown = {_deal(c.layout) for c in found.best}
    rows = best_of_each_deal(whole)
    rows = sorted(rows, key=lambda row: float(whole.found.step_seconds[row]))
    said: list[RejectedLayout] = []
    for row in rows:
        if limit is not None and len(said) == limit:
            break
        one = whole.candidate(row)
        if _deal(one.layout) in shown:
            continue
        bits = int(whole.found.reasons[row]) & FATAL
        if not bits:
            one = resimulated(found.model, one, found.job.task == "lora")
            reason = dominated(one, best)
        elif bits & MEMORY:
            reason = too_much(one)
        else:
            reason = "; ".join(REASONS[p] for p in range(len(REASONS)) if bits >> p & 1)
        said.append(RejectedLayout(one.layout, reason, one.step_seconds.middle, one.fits))
    return sorted(said, key=lambda r: r.seconds)


def refusals(found: ClusterPlan) -> list[str]:
    """How many ways to deal out the devices each rule has left out, and how many didn't fit."""
    whole = found.considered[0]
    said = [f"{count} x {rule}" for rule, count in whole.enumeration.refused.items()]
    bits = whole.found.reasons & FATAL
    full = int(np.count_nonzero(bits & MEMORY))
    if full:
        said.append(f"{full:,} of {len(bits):,} layouts don't fit into memory")
    return said


def best_of_each_deal(whole: EvaluatedLayouts) -> list[int]:
    """For each way to deal out the devices the row of its quickest that fits, or leanest."""
    rows, told = whole.layouts, whole.found
    deals = np.stack([rows.dp, rows.tp, rows.pp, rows.ep, rows.cp], axis=1)
    # Those that fit come first, by time; those that don't, by memory.
    value = np.where(told.fits, told.step_seconds, told.memory_p90)
    order = np.lexsort((value, ~told.fits))
    _, first = np.unique(deals[order], axis=0, return_index=True)
    return [int(row) for row in order[first]]


def read_layout(words_: Sequence[str], like: PlannedLayout) -> PlannedLayout:
    """``dp=4 tp=8 micro=2 recompute=full`` as a layout; what isn't said is as in ``like``.

    Where it has no pipeline, or another schedule, the schedule or the chunks of ``like`` aren't
    taken over.

    Raises:
        InputError: by ``Layout``, for values that can't be.
    """
    said = layout_fields(words_)
    if said.get("pp", like.pp) == 1:
        said = {"schedule": "1f1b", "virtual": 1} | said
    elif said.get("schedule", like.schedule) != like.schedule:
        said = {"virtual": 1} | said
    return replace(like, **said)


def _deal(layout: PlannedLayout) -> tuple[int, ...]:
    return layout.dp, layout.tp, layout.pp, layout.ep, layout.cp
