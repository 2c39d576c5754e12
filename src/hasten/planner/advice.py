"""What would change the answer: a faster network, other devices or formats, another model shape.

Everything is predicted with the same model, so that common errors cancel in the ratios; the
interval of each prediction is that of ``predict`` all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hasten.errors import InputError
from hasten.machine.accelerators import DEVICES, Device
from hasten.models.architecture import Architecture
from hasten.planner.candidate import PlanCandidate, candidate
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedLayout
from hasten.planner.planning import ClusterPlan, plan
from hasten.planner.predict import predict
from hasten.planner.reasons import PARTS, changed_cluster
from hasten.planner.simulate import resimulated

WORTH = 500  # of the quickest layouts, those that another machine may prefer


@dataclass(frozen=True)
class LayoutChange:
    """Something changed: the rate against that of the plan's best, with its layout and anew."""

    what: str
    same_layout: float  # times the tokens per second; nan where it no longer fits
    best_layout: float
    layout: PlannedLayout | None  # the best then, if it is another one
    note: str = ""


@dataclass(frozen=True)
class HardwareOption:
    """The same job on as many devices of another kind."""

    device: str
    found: PlanCandidate | None
    reason: str = ""  # why there is none
    price_ratio: float = float("nan")  # an hour of it may cost so many times one of the plan's


def sensitivity(found: ClusterPlan) -> list[LayoutChange]:
    """What twice or half of each property of the machine would do to the rate."""
    here = found.cluster
    chip = here.device
    twice = {
        "twice the network": replace(here, inter=2 * here.inter),
        "half the network": replace(here, inter=here.inter / 2),
        "twice the link within a node": replace(here, intra=2 * here.intra),
        "half the link within a node": replace(here, intra=here.intra / 2),
        "twice the memory's rate": replace(
            here, device=replace(chip, memory_rate=2 * chip.memory_rate)
        ),
        "twice the products' rate": replace(here, device=_faster(chip, 2.0)),
        "twice the memory": replace(here, device=replace(chip, memory_bytes=2 * chip.memory_bytes)),
    }
    if here.nodes == 1:
        twice = {name: value for name, value in twice.items() if "network" not in name}
    return [_changed(found, name, cluster) for name, cluster in twice.items()]


def switches(found: ClusterPlan) -> list[LayoutChange]:
    """What formats and compression that change the mathematics would do to the rate."""
    best, chip = found.best[0].layout, found.cluster.device
    said = "other mathematics: have the guard prove it"
    tried = {"fp8 products": replace(best, precision="fp8")} if chip.peak8 else {}
    if chip.peak4:
        tried["nvfp4 products"] = replace(best, precision="nvfp4")
    if best.dp * best.cp > 1:
        for word in ("int8", "int4", "topk1"):
            tried[f"gradients as {word}"] = replace(best, compression=word)
    changes = []
    for name, layout in tried.items():
        ratio = _ratio(found, found.cluster, [layout])[0]
        changes.append(LayoutChange(name, ratio, ratio, None, said))
    return changes


def devices(found: ClusterPlan) -> list[HardwareOption]:
    """The job on as many devices of each kind known, the quickest first."""
    choices = []
    for name, chip in DEVICES.items():
        if name == found.cluster.device.name:
            choices.append(HardwareOption(name, found.best[0], "", 1.0))
            continue
        own = found.cluster.intra == found.cluster.device.link
        there = replace(found.cluster, device=chip, intra=chip.link if own else found.cluster.intra)
        try:
            best = plan(
                *(found.model, there, found.job),
                space=found.space,
                top=1,
                fewer_nodes=False,
                calibration=found.calibration,
                stack=found.stack,
            ).best[0]
        except InputError as error:
            choices.append(HardwareOption(name, None, str(error)))
            continue
        ratio = found.best[0].step_seconds.middle / best.step_seconds.middle
        choices.append(HardwareOption(name, best, "", ratio))
    return sorted(choices, key=lambda c: -c.price_ratio if c.found else 0.0)


def what_if(found: ClusterPlan, change: str) -> tuple[Cluster, ClusterPlan]:
    """The plan anew with one change: ``gpu=a100``, ``nodes=8``, ``network=25``, ``network=2x``.

    Raises:
        InputError: a change that can't be read, or a cluster on which nothing fits.
    """
    there = changed_cluster(found.cluster, change)
    return there, plan(
        *(found.model, there, found.job),
        space=found.space,
        top=1,
        fewer_nodes=False,
        calibration=found.calibration,
        stack=found.stack,
    )


def _faster(chip: Device, times: float) -> Device:
    names = ("peak16", "peak8", "peak4", "peak32", "reached16", "reached8", "reached32")
    rates: dict[str, Any] = {name: times * getattr(chip, name) for name in names}
    return replace(chip, **rates)


def _changed(found: ClusterPlan, name: str, cluster: Cluster) -> LayoutChange:
    """The plan's layout on the changed cluster, and the best of those that may be best there."""
    whole, best = found.considered[0], found.best[0].layout
    order = np.argsort(whole.found.step_seconds)[:WORTH]
    fitting = whole.order()[:WORTH]
    rows = [whole.layouts.at(int(row)) for row in {*order.tolist(), *fitting.tolist()}]
    # Closed forms may call another layout quicker than the best here already: not by the change.
    ahead = np.nan_to_num(_ratio(found, found.cluster, [best, *rows]), nan=1.0)
    ratios = (np.array(_ratio(found, cluster, [best, *rows])) / np.maximum(ahead, 1.0)).tolist()
    winner = int(np.nanargmax(ratios)) if not np.all(np.isnan(ratios)) else 0
    another = rows[winner - 1] if winner and ratios[winner] > 1.01 * ratios[0] else None
    return LayoutChange(name, ratios[0], ratios[winner] if another else ratios[0], another)


def _ratio(found: ClusterPlan, cluster: Cluster, layouts: list[PlannedLayout]) -> list[float]:
    """Rates of the layouts there, over that of the plan's best here; nan where they don't fit."""
    rows = Layouts.of(layouts)
    there = predict(found.model, cluster, found.job, rows, found.calibration, found.stack)
    here = predict(
        *(found.model, found.cluster, found.job, Layouts.of([found.best[0].layout])),
        *(found.calibration, found.stack),
    )
    ratio = here.step_seconds[0] / there.step_seconds
    return [float(r) if fits else float("nan") for r, fits in zip(ratio, there.fits, strict=True)]


def predicted(found: ClusterPlan, layout: PlannedLayout) -> PlanCandidate:
    """What a layout of the user's own would do on the plan's cluster."""
    rows = Layouts.of([layout])
    told = predict(found.model, found.cluster, found.job, rows, found.calibration, found.stack)
    one = candidate(told, rows, 0, found.cluster, found.job)
    return resimulated(found.model, one, found.job.task == "lora")


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


def shape_advice(found: ClusterPlan, most: int = 5) -> list[Shape]:
    """The neighbours that gain the most in the plan's best layout, one for each kind of change."""
    like = found.best[0]
    base = _predicted(found, found.model, like)
    shapes: dict[str, Shape] = {}
    for kind, said, model in neighbours(found.model):
        one = _predicted(found, model, like)
        if not one.fits:
            continue
        size = model.parameters() / found.model.parameters()
        gain = base.step_seconds.middle / one.step_seconds.middle * size - 1
        if gain < WORTH_SHAPING:
            continue
        shape = Shape(model, said, size, gain, _reason(base, one, size))
        if kind not in shapes or gain > shapes[kind].gain:
            shapes[kind] = shape
    return sorted(shapes.values(), key=lambda s: -s.gain)[:most]


def neighbours(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    """(kind of change, in words, the neighbour), all within ``SIZE`` of the parameters."""
    for kind, said, other in _changes(model):
        if abs(other.parameters() / model.parameters() - 1) <= SIZE and other != model:
            yield kind, said, other


def _changes(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    for tile in (TILE, 8 * TILE):
        rows = -(-model.vocabulary // tile) * tile
        yield "vocabulary", f"vocabulary {rows}", replace(model, vocabulary=rows)
    for tile in (TILE, 2 * TILE, 8 * TILE):
        for ffn in (model.ffn // tile * tile, -(-model.ffn // tile) * tile):
            if ffn:
                yield "ffn", f"ffn {ffn}", replace(model, ffn=ffn)
    yield from _heads(model)
    yield from _depths(model)


def _heads(model: Architecture) -> Iterator[tuple[str, str, Architecture]]:
    """Fewer, wider heads (or the other way round) of the same width in all."""
    if model.latent:
        return
    for width in (64, 128, 256):
        heads, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        if heads % width == 0 and keys % width == 0 and (heads // width) % (keys // width) == 0:
            changed = replace(model, head_dim=width, heads=heads // width, kv_heads=keys // width)
            yield "heads", f"{heads // width} heads of {width}", changed


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


def _predicted(found: ClusterPlan, model: Architecture, like: PlanCandidate) -> PlanCandidate:
    """That model in the layout of the plan's best, by the closed form as all of them are."""
    rows = Layouts.of([like.layout])
    told = predict(model, found.cluster, found.job, rows, found.calibration, found.stack)
    return candidate(told, rows, 0, found.cluster, found.job)


def _reason(base: PlanCandidate, one: PlanCandidate, size: float) -> str:
    """The part of the step that shrinks the most."""
    gaps = {name: base.step_parts[name] * size - one.step_parts[name] for name in PARTS}
    most = max(gaps, key=gaps.__getitem__)
    return f"{PARTS[most]} takes {gaps[most]:.3g} s less of {base.step_seconds.middle:.3g}"
