"""Bytes of a layout on its fullest rank: state, activations, logits, and the rest.

Weights take 2 bytes. Gradients take 4 if they are summed in fp32 over micro-batches,
and 2 if they are sharded at once. AdamW takes 12 with its fp32 master weights
(arXiv 1910.02054, section 3). In a pipeline three ranks may be the fullest. The first
has the embedding and the most micro-batches in flight. The second has as many layers
and more of them with experts. The last has the head and the logits. The function
``layer_bytes`` counts the bytes of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hasten.planner.layout import (
    FP32,
    FULL,
    GPIPE,
    INTERLEAVED,
    LIGHT,
    PRECISIONS,
    SELECTIVE,
    ZERO_BUBBLE,
    Column,
    Layouts,
)
from hasten.planner.numbers import SLOTS, MemoryConstants, ModelNumbers, Value, stage_layers, tokens

# Bytes of activations: what a layer keeps of one micro-batch, and what it needs while at work.
#
# Counted from what the backward pass of each product and each norm needs, as in arXiv 2205.05198.
# By the word of a layout's ``recompute``:
#
#     none       inputs of norms and products, queries, keys, values, the MLP's two sides
#     light      norms, activation functions and the up-projections of latent attention are computed
#                again, so their results go (DeepSeek-V3, arXiv 2412.19437, section 3.2.3; Megatron
#                Core's recompute modules layernorm, moe_act and mla_up_proj)
#     selective  results of every other product, as torchtitan does; without flash attention, all
#                but the scores (arXiv 2205.05198)
#     full       a layer's input alone
#
# Products in fewer than 16 bits keep their inputs in that format, which their weights' gradient is
# computed from; under ``light`` the two inputs of a gated activation too, and what attention
# returns in 12 bits (arXiv 2412.19437, section 3.3.3). What attention and norms need stays in 16
# bits.

SELECTIVE_KEEPS = 0.5
# Bytes of an element that a product's input is kept in: a scale per 32 or per 128 of them is in it.
_KEPT_BYTES = {"fp8": 1.03, "fp32": 4.0}
KEPT_BYTES = np.array([_KEPT_BYTES.get(name, 2.0) for name in PRECISIONS])


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch: stored by kind of layer, and working memory."""

    plain: Column
    expert: Column
    working: Column  # all that the larger of both makes in a forward pass


@dataclass(frozen=True)
class _Elements:
    """Elements that a layer makes for a token on one rank; its MLP's are of one kind of layer."""

    stream: Column  # inputs of its two norms
    normed: Column  # their results, inputs of products
    heads: Column  # queries, keys and values
    latent: Column  # what latent attention makes them from; 0 without it
    attended: Column
    wide: Column  # results of the MLP's first products
    active: Column  # of its activation function
    routed: Column  # a token's copies for its experts, or 0

    @property
    def expanded(self) -> Column:
        """Elements of queries, keys and values that latent attention recomputes from fewer."""
        more = np.maximum(self.heads - self.latent, 0.0)
        return np.asarray(np.where(self.latent > 0, more, 0.0))

    def full(self, size: Value) -> Column:
        """Bytes of all that is kept without recomputation, at that size of products' inputs."""
        narrow = self.normed + self.active + self.routed
        broad = self.stream + self.heads + self.attended + self.wide + self.routed
        return np.asarray(size * narrow + np.maximum(size, 2.0) * broad)

    def light(self, size: Value) -> Column:
        """The same where what is cheap is computed again."""
        broad = self.stream + self.heads - self.expanded
        inputs = size * self.routed + np.maximum(size, 1.0) * self.wide
        attended = np.where(size < 2, 1.5, size) * self.attended
        return np.asarray(inputs + attended + np.maximum(size, 2.0) * broad)


def layer_bytes(model: ModelNumbers, layouts: Layouts) -> LayerBytes:
    """Bytes that one layer stores for one micro-batch, and its working memory."""
    T = tokens(model, layouts)
    size = KEPT_BYTES[layouts.precision.astype(int)]
    scores = 5 * T * model.sequence * model.heads / layouts.tp * (1 - layouts.flash)
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    broad = np.maximum(size, 2.0)  # bytes of what is never kept in fewer than 16 bits
    boundary = broad * T * model.hidden / split
    retained_bytes, largest = [], np.zeros(len(T))
    for made in (_elements(model, layouts, False), _elements(model, layouts, True)):
        full_bytes = T * made.full(size) + scores
        # Latent attention goes back to its low ranks.
        fewer = made.full(broad) - broad * made.expanded
        fewer = np.where(layouts.flash > 0, SELECTIVE_KEEPS, 1.0) * T * fewer
        retained = np.where(layouts.recompute == SELECTIVE, fewer, full_bytes)
        retained = np.where(layouts.recompute == LIGHT, T * made.light(size) + scores, retained)
        retained = np.where(layouts.recompute == FULL, boundary, retained)
        retained_bytes.append(np.where(made.stream > 0, retained, 0.0))
        # Softmax, mask and gradients of scores pass through memory beside what is kept of them.
        largest = np.maximum(largest, T * made.full(size) + 2 * scores)
    return LayerBytes(retained_bytes[0], retained_bytes[1], largest)


def _elements(model: ModelNumbers, layouts: Layouts, expert: bool) -> _Elements:
    """Elements of a layer with a plain MLP, or with experts; 0 if there is no such layer.

    The width of a slot is that of the layers that have it, so no average is used.
    """
    tp = layouts.tp
    split = np.where(layouts.sequence_parallel > 0, tp, 1)
    has = np.asarray(model.moe_layers > 0 if expert else model.layers > model.moe_layers)
    ranks = sum(model.outputs[SLOTS.index(slot)] for slot in ("q_down", "kv_down"))
    heads = model.heads * model.query_width + model.kv_width
    names = ("shared_down", "expert_down") if expert else ("down",)
    width = sum(
        (model.active if name == "expert_down" else 1.0) * model.inputs[SLOTS.index(name)]
        for name in names
    )
    routed = model.active * model.hidden if expert else 0.0
    base = 2 * model.hidden / split
    present = np.where(has, 1.0, 0.0)
    return _Elements(
        stream=present * base,
        normed=present * base,
        heads=present * heads / tp,
        latent=present * ranks,
        attended=present * model.heads * model.value_width / tp,
        wide=present * width * (model.gate - 1) / tp,
        active=present * width / tp,
        routed=present * routed / tp,
    )


# Bytes of a rank.

LORA_SHARE = 0.005  # of the weights, in adapters that learn
# What isn't known of software that nobody named: whether gradients take 2, 4, 6 bytes or more
# (16 bits, fp32 sums, both, with buffers), so as much again; and of all else this share. Of the
# pairs that were tried these explain the held-out errors of 85 measurements about best.
GRADIENTS_DOUBT, REST_DOUBT = 1.0, 0.08


@dataclass(frozen=True)
class MemoryColumns:
    """Resident bytes of the fullest rank, by what they are."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    overhead: Column

    @property
    def total(self) -> Column:
        parts = (self.weights, self.gradients, self.optimizer, self.activations)
        return np.asarray(sum(parts) + self.logits + self.overhead)

    @property
    def doubt(self) -> Column:
        """A share of the total: the unit of its interval (``Calibration.spread``)."""
        other_bytes = self.total - self.gradients
        unsure = np.hypot(GRADIENTS_DOUBT * self.gradients, REST_DOUBT * other_bytes)
        return np.asarray(unsure / self.total)


@dataclass(frozen=True)
class PlannedRank:
    """One rank of a pipeline: what it holds of the model, and of micro-batches in flight."""

    exists: Column  # 1 where the pipeline has such a rank beside the others
    layers: Column
    ends: Column  # parameters of embedding and head
    waiting: Column  # bytes of activations that wait for their backward pass
    head: Column  # 1 where it makes the logits


def rank_parameters(
    model: ModelNumbers, layouts: Layouts, layers: Value, ends: Value
) -> tuple[Column, Column]:
    """Parameters of a rank with so many layers before data parallelism shards: rest, experts."""
    share = layers / model.layers
    body = (model.layer_parameters * share + ends) / layouts.tp
    return np.asarray(body), np.asarray(model.expert_parameters * share / layouts.ep)


def first_rank(model: ModelNumbers, layouts: Layouts) -> tuple[Column, Column]:
    """Layers of the first rank's stage, and parameters of the model's ends that it has."""
    dealt = stage_layers(model.layers, layouts.pp, layouts.virtual)
    one = model.vocabulary * model.hidden
    return dealt.first, np.where(layouts.pp > 1, one, model.embedding_parameters)


def memory(
    model: ModelNumbers, layouts: Layouts, micro_batches: Value, c: MemoryConstants, lora: Value
) -> MemoryColumns:
    """Bytes on the fullest rank at its maximum."""
    one = layer_bytes(model, layouts)
    ranks = _ranks(model, layouts, micro_batches, one)
    rank_columns = [_held(rank, one, model, layouts, c, lora) for rank in ranks]
    totals = np.stack([r.exists * h.total for r, h in zip(ranks, rank_columns, strict=True)])
    fullest = np.argmax(totals, axis=0)
    parts = {
        f.name: np.choose(fullest, [getattr(h, f.name) for h in rank_columns])
        for f in fields(MemoryColumns)
    }
    return MemoryColumns(**parts)


def in_flight(layouts: Layouts, micro_batches: Value, rank: Value = 0) -> Column:
    """Micro-batches with stored activations on that rank, in units of all its layers."""
    pp, v, code = layouts.pp, layouts.virtual, layouts.schedule
    most = pp - rank + 0 * v
    most = np.where(code == INTERLEAVED, (2 * (pp - rank - 1) + (v - 1) * pp + 1) / v, most)
    most = np.where(code == ZERO_BUBBLE, pp, most)
    most = np.where(code == GPIPE, micro_batches, most)
    return np.asarray(np.minimum(np.where(pp > 1, most, 1.0), micro_batches))


def _ranks(
    model: ModelNumbers, layouts: Layouts, micro_batches: Value, one: LayerBytes
) -> tuple[PlannedRank, PlannedRank, PlannedRank]:
    """The ranks that may be the fullest; the first layers are those without experts."""
    pp, virtual = layouts.pp, layouts.virtual
    dealt = stage_layers(model.layers, pp, virtual)
    several = pp > 1
    plain = model.layers - model.moe_layers

    def stored(layers: Column, without: Column) -> Column:
        return np.asarray(without * one.plain + (layers - without) * one.expert)

    layers, ends = first_rank(model, layouts)
    early = np.minimum(plain, dealt.first / virtual)  # of a rank's chunks the first has them
    early = np.where(several, np.maximum(early, dealt.first - model.moe_layers), plain)
    entered = in_flight(layouts, micro_batches) * stored(dealt.first, early)
    late = np.maximum(dealt.last - model.moe_layers, 0)
    inner = np.maximum(dealt.most - model.moe_layers, 0)
    second = in_flight(layouts, micro_batches, 1) * stored(dealt.most, inner)
    last = in_flight(layouts, micro_batches, pp - 1) * stored(dealt.last, late)
    always = np.ones(len(layouts))
    return (
        PlannedRank(always, layers, ends, entered, np.where(several, 0.0, 1.0)),
        PlannedRank(np.where(pp > 2, 1.0, 0.0), *(dealt.most, 0 * always, second, 0 * always)),
        PlannedRank(
            np.where(several, 1.0, 0.0),
            *(dealt.last, model.vocabulary * model.hidden * always, last, always),
        ),
    )


def _held(
    rank: PlannedRank,
    one: LayerBytes,
    model: ModelNumbers,
    layouts: Layouts,
    c: MemoryConstants,
    lora: Value,
) -> MemoryColumns:
    """Bytes stored on that rank."""
    body, experts = rank_parameters(model, layouts, rank.layers, rank.ends)
    shards = layouts.dp * layouts.cp
    spread = np.maximum(shards * layouts.tp / layouts.ep, 1.0)

    def parameters_share(stage: int) -> Column:
        """The rank's share of parameters, with what that ZeRO stage shards dealt out."""
        sharded = layouts.zero >= stage
        return body / np.where(sharded, shards, 1) + experts / np.where(sharded, spread, 1)

    learns = np.where(lora, LORA_SHARE, 1.0)
    is_fp32 = layouts.precision == FP32
    layer = (body + experts) / np.maximum(rank.layers, 1)
    gathered = np.where(layouts.zero >= 3, 2 * layer, 0.0)  # one at work, the next on its way
    working = np.maximum(c.working * one.working - np.maximum(one.plain, one.expert), 0.0)
    logits = rank.head * tokens(model, layouts) * model.vocabulary / layouts.tp * c.logits
    return MemoryColumns(
        weights=c.state * np.where(is_fp32, 4.0, 2.0) * (parameters_share(3) + gathered),
        gradients=c.state
        * np.where((layouts.zero >= 2) & ~is_fp32, 2.0, 4.0)
        * parameters_share(2)
        * learns,
        optimizer=c.state * np.where(is_fp32, 8.0, 12.0) * parameters_share(1) * learns,
        activations=c.activations * rank.waiting + working,
        logits=logits,
        overhead=c.context * 1e9 + 0 * rank.waiting,
    )
