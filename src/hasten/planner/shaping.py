"""Advice on a model's shape: neighbours of the same size that would train faster, and why.

A neighbour has parameters within 2 % of the config's and differs in one way: deeper or wider,
another width of the MLP, of a head, a vocabulary padded to full tiles. What is gained beyond what a
smaller model gains anyway is told. Whether such a model learns as well isn't predicted; the
literature finds loss to depend little on the shape within wide limits (arXiv 2001.08361, figure 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hasten.models.architecture import Architecture
from hasten.planner.candidate import Candidate, candidate
from hasten.planner.layout import Layouts
from hasten.planner.planning import ClusterPlan
from hasten.planner.predict import predict
from hasten.planner.reasons import PARTS

SIZE = 0.02  # by which parameters may differ
WORTH = 0.01  # less of a gain isn't told
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
        if gain < WORTH:
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


def _predicted(found: ClusterPlan, model: Architecture, like: Candidate) -> Candidate:
    """That model in the layout of the plan's best, by the closed form as all of them are."""
    rows = Layouts.of([like.layout])
    told = predict(model, found.cluster, found.job, rows, found.calibration, found.stack)
    return candidate(told, rows, 0, found.cluster, found.job)


def _reason(base: Candidate, one: Candidate, size: float) -> str:
    """The part of the step that shrinks the most."""
    gaps = {name: base.step_parts[name] * size - one.step_parts[name] for name in PARTS}
    most = max(gaps, key=gaps.__getitem__)
    return f"{PARTS[most]} takes {gaps[most]:.3g} s less of {base.step_seconds.middle:.3g}"
