"""Reasons why a layout isn't the plan: invalid, too large, or slower than another.

Every sentence contains its numbers. The function ``why_not`` answers for one layout
that a user names. The function ``rejected`` answers for each division of the devices,
by its best variant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.machine.accelerators import DEVICES, device
from hasten.models.architecture import Architecture
from hasten.planner.candidate import PlanCandidate, micro_batches_of
from hasten.planner.cluster import Cluster
from hasten.planner.layout import (
    SIMULATED,
    PlannedJob,
    PlannedLayout,
    has_format,
    why_impossible,
)
from hasten.planner.planning import ClusterPlan

# What a user writes on a command line, read: a layout's words, counts like 15T, changes to try.

_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SHORT = {
    "micro": "micro_batch",
    "gradients": "compression",
    "vpp": "virtual",
    "mbs": "micro_batch",
}
_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
CHANGES = ("gpu", "nodes", "gpus_per_node", "network", "link")


def count_of(text: str, what: str) -> float:
    """A number with k, M, B or T behind it.

    Raises:
        InputError: it is none, or not positive.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    value = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if value <= 0 or value > 1e18:
        raise InputError(f"{what} is {text!r}; give a number such as 500M, 1B or 14.8T")
    return value


def layout_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """``tp=8``, ``recompute=full`` ... as fields of a layout, also several in one word.

    Raises:
        InputError: a key that a layout doesn't have, or no number where one is needed.
    """
    kinds = {f.name: f.default for f in fields(PlannedLayout)}
    settings: dict[str, Any] = {}
    for word in (w for text in assignments for w in re.split(r"[,\s]+", text) if w):
        key, equals, value = word.partition("=")
        name = _SHORT.get(key, key)
        if not equals or name not in kinds:
            raise InputError(
                f"a layout has no {word!r}{did_you_mean(key, kinds)}: write tp=8,recompute=full"
            )
        if isinstance(kinds[name], bool):
            if value.lower() not in _BOOLEANS:
                raise InputError(f"{name} is {value!r}; write yes or no")
            settings[name] = _BOOLEANS[value.lower()]
        elif isinstance(kinds[name], int):
            settings[name] = _whole(value, name)
        else:
            settings[name] = value
    return settings


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
        return cluster.with_device(device(value))
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


# Reasons.

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


def why_not(cluster_plan: ClusterPlan, layout: PlannedLayout) -> list[str]:
    """Why that layout isn't the best of the plan, a sentence each; empty: it is."""
    model, cluster, best = cluster_plan.model, cluster_plan.cluster, cluster_plan.best[0]
    against = impossibilities(model, cluster, cluster_plan.job, layout)
    if against:
        return against
    one = cluster_plan.simulated(cluster_plan.closed_form(layout))
    if not one.fits:
        return [too_much(one)]
    return [] if layout == best.layout else [dominated(one, best)]


def impossibilities(
    model: Architecture, cluster: Cluster, job: PlannedJob, layout: PlannedLayout
) -> list[str]:
    """The constraints that a layout violates, each with the nearest valid value."""
    reasons = []
    if layout.devices != cluster.devices:
        reasons.append(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} are "
            f"{layout.devices} devices, the cluster has {cluster.devices}"
        )
    share = layout.dp * layout.micro_batch
    if job.global_batch % share:
        near = max(share, round(job.global_batch / share) * share)
        reasons.append(
            f"a global batch of {job.global_batch} isn't a multiple of dp {layout.dp} x "
            f"micro-batch {layout.micro_batch}: {near} would be"
        )
    if model.heads % layout.tp:
        reasons.append(f"{model.heads} attention heads can't be shared by tp {layout.tp}")
    if layout.pp * layout.virtual > model.layers + 2:  # input and output may be stages
        reasons.append(
            f"{model.layers} layers can't make {layout.pp * layout.virtual} stages (pp "
            f"{layout.pp} x {layout.virtual})"
        )
    ranks = layout.dp * layout.cp * layout.tp
    experts = model.moe.count if model.moe else 1
    if layout.ep > 1 and (experts % layout.ep or ranks % layout.ep):
        reasons.append(
            f"ep {layout.ep} must divide the {experts} routed experts and the {ranks} ranks of a "
            "stage"
        )
    if not has_format(cluster, layout.precision):
        reasons.append(f"{cluster.device.name} has no unit for products in {layout.precision}")
    if layout.pp > 1 and layout.schedule in SIMULATED and not job.global_batch % share:
        schedule_reason = why_impossible(
            layout.schedule, layout.pp, micro_batches_of(layout, job), layout.virtual
        )
        reasons += [schedule_reason] if schedule_reason else []
    return reasons


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


def rejected(cluster_plan: ClusterPlan, limit: int | None = None) -> list[RejectedLayout]:
    """Each way to deal out all devices that isn't among the best, the nearest to them first."""
    evaluated, best = cluster_plan.considered[0], cluster_plan.best[0]
    rows, predictions = evaluated.layouts, evaluated.predictions
    # Of each deal the quickest that fits, or the leanest.
    value = np.where(predictions.fits, predictions.step_seconds, predictions.memory_p90)
    order = np.lexsort((value, ~predictions.fits))
    deals = np.stack([rows.dp, rows.tp, rows.pp, rows.ep, rows.cp], axis=1)
    _, first = np.unique(deals[order], axis=0, return_index=True)
    shown = {c.layout.deal for c in cluster_plan.best}
    rejected_layouts: list[RejectedLayout] = []
    for row in sorted(order[first], key=lambda row: float(predictions.step_seconds[row])):
        if limit is not None and len(rejected_layouts) == limit:
            break
        one = evaluated.candidate(int(row))
        if one.layout.deal in shown:
            continue
        if one.fits:
            one = cluster_plan.simulated(one)
        reason = dominated(one, best) if one.fits else too_much(one)
        rejected_layouts.append(
            RejectedLayout(one.layout, reason, one.step_seconds.middle, one.fits)
        )
    return sorted(rejected_layouts, key=lambda r: r.seconds)


def refusals(cluster_plan: ClusterPlan) -> list[str]:
    """How many ways to deal out the devices each rule has left out, and how many didn't fit."""
    evaluated = cluster_plan.considered[0]
    sentences = [f"{count} x {rule}" for rule, count in evaluated.enumeration.refused.items()]
    fits = evaluated.predictions.fits
    if full := int(np.count_nonzero(~fits)):
        sentences.append(f"{full:,} of {len(fits):,} layouts don't fit into memory")
    return sentences


def read_layout(words_: Sequence[str], like: PlannedLayout) -> PlannedLayout:
    """Parses a layout, for example ``dp=4 tp=8 micro=2 recompute=full``.

    Values that are missing come from ``like``.

    If it has no pipeline, or another schedule, the schedule and the chunks of ``like``
    aren't used.

    Raises:
        InputError: from ``Layout``, for invalid values.
    """
    settings = layout_fields(words_)
    if settings.get("pp", like.pp) == 1:
        settings = {"schedule": "1f1b", "virtual": 1} | settings
    elif settings.get("schedule", like.schedule) != like.schedule:
        settings = {"virtual": 1} | settings
    return replace(like, **settings)


# What would change the answer: a faster network, other devices or formats, another model shape.
#
# Everything is predicted with the same model, so that common errors cancel in the ratios; the
# interval of each prediction is that of ``predict`` all the same.

WORTH = 500  # of the quickest layouts, those that another machine may prefer


@dataclass(frozen=True)
class LayoutChange:
    """A change and its effect on the rate, relative to the plan's best.

    It has the rate of the same layout, and that of the best layout after the change.
    """

    what: str
    same_layout: float  # times the tokens per second; nan where it no longer fits
    best_layout: float
    layout: PlannedLayout | None  # the best then, if it is another one
    note: str = ""


@dataclass(frozen=True)
class HardwareOption:
    """The same job on as many devices of another kind."""

    device: str
    best: PlanCandidate | None
    reason: str = ""  # why there is none
    price_ratio: float = float("nan")  # an hour of it may cost so many times one of the plan's


def sensitivity(cluster_plan: ClusterPlan) -> list[LayoutChange]:
    """The effect on the rate of doubling or halving each property of the machine."""
    planned_cluster = cluster_plan.cluster
    chip = planned_cluster.device
    names = ("peak16", "peak8", "peak4", "peak32", "reached16", "reached8", "reached32")
    faster: dict[str, Any] = {name: 2 * getattr(chip, name) for name in names}
    twice = {
        "twice the network": replace(planned_cluster, inter=2 * planned_cluster.inter),
        "half the network": replace(planned_cluster, inter=planned_cluster.inter / 2),
        "twice the link within a node": replace(planned_cluster, intra=2 * planned_cluster.intra),
        "half the link within a node": replace(planned_cluster, intra=planned_cluster.intra / 2),
        "twice the memory's rate": replace(
            planned_cluster, device=replace(chip, memory_rate=2 * chip.memory_rate)
        ),
        "twice the products' rate": replace(planned_cluster, device=replace(chip, **faster)),
        "twice the memory": replace(
            planned_cluster, device=replace(chip, memory_bytes=2 * chip.memory_bytes)
        ),
    }
    if planned_cluster.nodes == 1:
        twice = {name: value for name, value in twice.items() if "network" not in name}
    return [_changed(cluster_plan, name, cluster) for name, cluster in twice.items()]


def switches(cluster_plan: ClusterPlan) -> list[LayoutChange]:
    """The effect on the rate of formats and compression that change the mathematics."""
    best, chip = cluster_plan.best[0].layout, cluster_plan.cluster.device
    caveat = "other mathematics: have the verification prove it"
    tried = {"fp8 products": replace(best, precision="fp8")} if chip.peak8 else {}
    if chip.peak4:
        tried["nvfp4 products"] = replace(best, precision="nvfp4")
    if best.dp * best.cp > 1:
        for word in ("int8", "int4", "topk1"):
            tried[f"gradients as {word}"] = replace(best, compression=word)
    changes = []
    for name, layout in tried.items():
        ratio = _ratio(cluster_plan, cluster_plan.cluster, [layout])[0]
        changes.append(LayoutChange(name, ratio, ratio, None, caveat))
    return changes


def devices(cluster_plan: ClusterPlan) -> list[HardwareOption]:
    """The job on as many devices of each kind known, the quickest first."""
    choices = []
    for name, chip in DEVICES.items():
        if name == cluster_plan.cluster.device.name:
            choices.append(HardwareOption(name, cluster_plan.best[0], "", 1.0))
            continue
        try:
            best = cluster_plan.best_on(cluster_plan.cluster.with_device(chip)).best[0]
        except InputError as error:
            choices.append(HardwareOption(name, None, str(error)))
            continue
        ratio = cluster_plan.best[0].step_seconds.middle / best.step_seconds.middle
        choices.append(HardwareOption(name, best, "", ratio))
    return sorted(choices, key=lambda c: -c.price_ratio if c.best else 0.0)


def what_if(cluster_plan: ClusterPlan, change: str) -> ClusterPlan:
    """Plans again with one change.

    Examples: ``gpu=a100``, ``nodes=8``, ``network=25``, ``network=2x``.

    Raises:
        InputError: a change that can't be read, or a cluster on which nothing fits.
    """
    return cluster_plan.best_on(changed_cluster(cluster_plan.cluster, change))


def _changed(cluster_plan: ClusterPlan, name: str, cluster: Cluster) -> LayoutChange:
    """The plan's layout on the changed cluster, and the best of those that may be best there."""
    evaluated, best = cluster_plan.considered[0], cluster_plan.best[0].layout
    order = np.argsort(evaluated.predictions.step_seconds)[:WORTH]
    fitting = evaluated.order()[:WORTH]
    rows = [evaluated.layouts.at(int(row)) for row in {*order.tolist(), *fitting.tolist()}]
    # Closed forms may call another layout quicker than the best here already: not by the change.
    ahead = np.nan_to_num(_ratio(cluster_plan, cluster_plan.cluster, [best, *rows]), nan=1.0)
    ratios = (
        np.array(_ratio(cluster_plan, cluster, [best, *rows])) / np.maximum(ahead, 1.0)
    ).tolist()
    winner = int(np.nanargmax(ratios)) if not np.all(np.isnan(ratios)) else 0
    another = rows[winner - 1] if winner and ratios[winner] > 1.01 * ratios[0] else None
    return LayoutChange(name, ratios[0], ratios[winner] if another else ratios[0], another)


def _ratio(
    cluster_plan: ClusterPlan, cluster: Cluster, layouts: list[PlannedLayout]
) -> list[float]:
    """Rates of the layouts there, over that of the plan's best here; nan where they don't fit."""
    there = cluster_plan.predict(layouts, cluster)
    best = cluster_plan.predict([cluster_plan.best[0].layout])
    ratio = best.step_seconds[0] / there.step_seconds
    return [float(r) if fits else float("nan") for r, fits in zip(ratio, there.fits, strict=True)]


# Advice on a model's shape: neighbours of the same size that would train faster, and why.
#
# A neighbour has parameters within 2 % of the config's and differs in one way: deeper or wider,
# another width of the MLP, of a head, a vocabulary padded to full tiles. What is gained beyond what
# a smaller model gains anyway is told. Whether such a model learns as well isn't predicted; the
# literature finds loss to depend little on the shape within wide limits (arXiv 2001.08361, figure
# 5).

SIZE = 0.02  # by which parameters may differ
WORTH_SHAPING = 0.01  # less of a gain isn't told
TILE = 128  # what products like their sides to be multiples of


@dataclass(frozen=True)
class Shape:
    """A neighbour: what is changed, and the rate against that of the config as it is."""

    model: Architecture
    changed: str
    parameters_ratio: float
    gain: float  # of the rate, beyond what the other number of parameters explains
    reason: str


def shape_advice(cluster_plan: ClusterPlan) -> list[Shape]:
    """The neighbours that gain the most in the plan's best layout, one for each kind of change."""
    layout = cluster_plan.best[0].layout
    base = cluster_plan.closed_form(layout)
    shapes: dict[str, Shape] = {}
    for kind, description, model in neighbours(cluster_plan.model):
        one = cluster_plan.closed_form(layout, model)
        against = impossibilities(model, cluster_plan.cluster, cluster_plan.job, layout)
        if against or not one.fits:
            continue
        size = model.parameters() / cluster_plan.model.parameters()
        gain = base.step_seconds.middle / one.step_seconds.middle * size - 1
        if gain < WORTH_SHAPING:
            continue
        # The part of the step that shrinks the most.
        gaps = {name: base.step_parts[name] * size - one.step_parts[name] for name in PARTS}
        part = max(gaps, key=gaps.__getitem__)
        step = base.step_seconds.middle
        reason = f"{PARTS[part]} takes {gaps[part]:.3g} s less of {step:.3g}"
        if kind not in shapes or gain > shapes[kind].gain:
            shapes[kind] = Shape(model, description, size, gain, reason)
    return sorted(shapes.values(), key=lambda s: -s.gain)[:5]


def neighbours(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    """(kind of change, in words, the neighbour), all within ``SIZE`` of the parameters."""
    for kind, description, other in _changes(model):
        if abs(other.parameters() / model.parameters() - 1) <= SIZE and other != model:
            yield kind, description, other


def _changes(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    for tile in (TILE, 8 * TILE):
        rows = -(-model.vocabulary // tile) * tile
        yield "vocabulary", f"vocabulary {rows}", replace(model, vocabulary=rows)
    for tile in (TILE, 2 * TILE, 8 * TILE):
        for ffn in (model.ffn // tile * tile, -(-model.ffn // tile) * tile):
            if ffn:
                yield "ffn", f"ffn {ffn}", replace(model, ffn=ffn)
    for width in (64, 128, 256) if not model.latent else ():  # of the same width in all
        heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        if heads % width == 0 and keys % width == 0 and (heads // width) % (keys // width) == 0:
            changed = replace(model, head_dim=width, heads=heads // width, kv_heads=keys // width)
            yield "heads", f"{heads // width} heads of {width}", changed
    yield from _depths(model)


def _depths(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    """More or fewer layers, the MLP (or an expert) as wide as makes up for it."""
    for layers in range(max(2, model.layers * 2 // 3), model.layers * 4 // 3 + 1):
        first = model.moe.dense_layers if model.moe else 0
        if layers == model.layers or layers <= first:
            continue
        low, high = 1, 64 * max(model.ffn // TILE, 1)
        while low < high:  # the width in tiles at which parameters are reached
            middle = (low + high) // 2
            if _wide(model, layers, middle * TILE).parameters() < model.parameters():
                low = middle + 1
            else:
                high = middle
        for tiles in (low - 1, low):
            if tiles:
                other = _wide(model, layers, tiles * TILE)
                yield "depth", f"{layers} layers, ffn {tiles * TILE}", other


def _wide(model: Architecture, layers: int, width: int) -> Architecture:
    if model.moe is None:
        return replace(model, layers=layers, ffn=width)
    return replace(model, layers=layers, moe=replace(model.moe, width=width))
