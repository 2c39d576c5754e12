"""Bytes of a layout on its fullest rank: state, activations, logits and overhead.

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

from hasten.models.host_memory import (
    DEVICE_PROCESS,
    FLOAT32,
    MOMENTS_FLOAT32,
    PROCESS,
    HostBytes,
    RankShare,
    host_bytes,
    largest_weight,
)
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
from hasten.planner.numbers import (
    SLOTS,
    MachineNumbers,
    MemoryConstants,
    ModelNumbers,
    Number,
    stage_layers,
    tokens,
)

# Bytes of activations that a layer stores for one micro-batch, and of its working memory.
#
# The backward pass of each product and norm needs them, as in arXiv 2205.05198. They depend on a
# layout's ``recompute``:
#
#     none       inputs of norms and products, queries, keys, values, the MLP's two sides
#     light      as none, without results of norms, activation functions and up-projections of
#                latent attention, which are recomputed (DeepSeek-V3, arXiv 2412.19437, section
#                3.2.3; Megatron Core's recompute modules layernorm, moe_act and mla_up_proj)
#     selective  results of every other product, as in torchtitan; without flash attention, all
#                but the scores (arXiv 2205.05198)
#     full       only a layer's input
#
# Products in fewer than 16 bits store their inputs in that format, for their weights' gradients.
# With ``light``, the two inputs of a gated activation are stored so, too, and attention's result in
# 12 bits (arXiv 2412.19437, section 3.3.3). Other tensors of attention and norms have 16 bits.

SELECTIVE_KEEPS = 0.5
# Bytes of an element of a product's stored input, with a scale per 32 or 128 elements.
_KEPT_BYTES = {"fp8": 1.03, "fp32": 4.0}
KEPT_BYTES = np.array([_KEPT_BYTES.get(name, 2.0) for name in PRECISIONS])


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and one micro-batch: stored by kind of layer, and working memory."""

    plain: Column
    expert: Column
    working: Column  # all tensors in the forward pass of the larger kind


@dataclass(frozen=True)
class _Elements:
    """Elements that a layer makes for a token on one rank; its MLP's are of one kind of layer."""

    stream: Column  # inputs of its two norms
    normed: Column  # results of the norms, which are inputs of products
    heads: Column  # queries, keys and values
    latent: Column  # low-rank vectors of latent attention; 0 without it
    attended: Column
    wide: Column  # results of the MLP's first products
    active: Column  # results of the MLP's activation function
    routed: Column  # copies of a token for its experts, or 0

    @property
    def expanded(self) -> Column:
        """Elements of queries, keys and values that latent attention recomputes from fewer."""
        more = np.maximum(self.heads - self.latent, 0.0)
        return np.asarray(np.where(self.latent > 0, more, 0.0))

    def full(self, size: Number) -> Column:
        """Returns the bytes without recomputation; a product's input has elements of ``size``."""
        narrow = self.normed + self.active + self.routed
        broad = self.stream + self.heads + self.attended + self.wide + self.routed
        return np.asarray(size * narrow + np.maximum(size, 2.0) * broad)

    def light(self, size: Number) -> Column:
        """Returns the bytes if cheap results are recomputed."""
        broad = self.stream + self.heads - self.expanded
        inputs = size * self.routed + np.maximum(size, 1.0) * self.wide
        attended = np.where(size < 2, 1.5, size) * self.attended
        return np.asarray(inputs + attended + np.maximum(size, 2.0) * broad)


def layer_bytes(model: ModelNumbers, layouts: Layouts) -> LayerBytes:
    """Returns the bytes that one layer stores for one micro-batch, and its working memory."""
    T = tokens(model, layouts)
    size = KEPT_BYTES[layouts.precision.astype(int)]
    scores = 5 * T * model.sequence * model.heads / layouts.tp * (1 - layouts.flash)
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    broad = np.maximum(size, 2.0)  # bytes of elements that have at least 16 bits
    boundary = broad * T * model.hidden / split
    retained_bytes, largest = [], np.zeros(len(T))
    for made in (_elements(model, layouts, False), _elements(model, layouts, True)):
        full_bytes = T * made.full(size) + scores
        # Latent attention stores its low-rank vectors only.
        fewer = made.full(broad) - broad * made.expanded
        fewer = np.where(layouts.flash > 0, SELECTIVE_KEEPS, 1.0) * T * fewer
        retained = np.where(layouts.recompute == SELECTIVE, fewer, full_bytes)
        retained = np.where(layouts.recompute == LIGHT, T * made.light(size) + scores, retained)
        retained = retained + 4 * T * model.chosen  # indices
        retained = np.where(layouts.recompute == FULL, boundary, retained)
        retained_bytes.append(np.where(made.stream > 0, retained, 0.0))
        # Softmax, mask and gradients of scores also need memory for a short time.
        largest = np.maximum(largest, T * made.full(size) + 2 * scores)
    return LayerBytes(retained_bytes[0], retained_bytes[1], largest)


def _elements(model: ModelNumbers, layouts: Layouts, expert: bool) -> _Elements:
    """Returns the elements of a layer with a plain MLP or experts; 0 if there is no such layer."""
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

LORA_SHARE = 0.005  # trained weights of adapters / all weights
# Relative uncertainty of unknown software: its gradients may take 2, 4, 6 bytes or more (16 bits,
# fp32 sums, both, with buffers). Among several pairs of values, these explain the held-out errors
# of 85 measurements best.
GRADIENTS_DOUBT, REST_DOUBT = 1.0, 0.08


@dataclass(frozen=True)
class MemoryColumns:
    """Resident bytes of the fullest rank, by kind."""

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
        """Relative uncertainty of the total: the unit of its interval (``Calibration.spread``)."""
        other_bytes = self.total - self.gradients
        unsure = np.hypot(GRADIENTS_DOUBT * self.gradients, REST_DOUBT * other_bytes)
        return np.asarray(unsure / self.total)


@dataclass(frozen=True)
class PlannedRank:
    """One rank of a pipeline: its part of the model, and of micro-batches in flight."""

    exists: Column  # 1 if the pipeline has this rank in addition to the others
    layers: Column
    ends: Column  # parameters of embedding and head
    waiting: Column  # bytes of activations that wait for their backward pass
    head: Column  # 1 if the rank computes the logits


def rank_parameters(
    model: ModelNumbers, layouts: Layouts, layers: Number, ends: Number
) -> tuple[Column, Column]:
    """Returns parameters of a rank without and with routed experts, before data-parallel shards."""
    share = layers / model.layers
    body = (model.layer_parameters * share + ends) / layouts.tp
    return np.asarray(body), np.asarray(model.expert_parameters * share / layouts.ep)


def first_rank(model: ModelNumbers, layouts: Layouts) -> tuple[Column, Column]:
    """Returns the layers of the first rank, and its parameters of embedding and head."""
    dealt = stage_layers(model.layers, layouts.pp, layouts.virtual)
    one = model.vocabulary * model.hidden
    return dealt.first, np.where(layouts.pp > 1, one, model.embedding_parameters)


def memory(
    model: ModelNumbers, layouts: Layouts, micro_batches: Number, c: MemoryConstants, lora: Number
) -> MemoryColumns:
    """Returns the peak bytes of the fullest rank."""
    one = layer_bytes(model, layouts)
    ranks = _ranks(model, layouts, micro_batches, one)
    rank_columns = [_rank_bytes(rank, one, model, layouts, c, lora) for rank in ranks]
    totals = np.stack([r.exists * h.total for r, h in zip(ranks, rank_columns, strict=True)])
    fullest = np.argmax(totals, axis=0)
    parts = {
        f.name: np.choose(fullest, [getattr(h, f.name) for h in rank_columns])
        for f in fields(MemoryColumns)
    }
    return MemoryColumns(**parts)


def in_flight(layouts: Layouts, micro_batches: Number, rank: Number = 0) -> Column:
    """Returns the micro-batches with stored activations on a rank, in units of all its layers."""
    pp, v, code = layouts.pp, layouts.virtual, layouts.schedule
    most = pp - rank + 0 * v
    most = np.where(code == INTERLEAVED, (2 * (pp - rank - 1) + (v - 1) * pp + 1) / v, most)
    most = np.where(code == ZERO_BUBBLE, pp, most)
    most = np.where(code == GPIPE, micro_batches, most)
    return np.asarray(np.minimum(np.where(pp > 1, most, 1.0), micro_batches))


def _ranks(
    model: ModelNumbers, layouts: Layouts, micro_batches: Number, one: LayerBytes
) -> tuple[PlannedRank, PlannedRank, PlannedRank]:
    """Returns the ranks that may be the fullest; the first layers have no experts."""
    pp, virtual = layouts.pp, layouts.virtual
    dealt = stage_layers(model.layers, pp, virtual)
    several = pp > 1
    plain = model.layers - model.moe_layers

    def stored(layers: Column, without: Column) -> Column:
        return np.asarray(without * one.plain + (layers - without) * one.expert)

    layers, ends = first_rank(model, layouts)
    early = np.minimum(plain, dealt.first / virtual)  # a rank's first chunk has the plain layers
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


def host_memory(
    model: ModelNumbers,
    layouts: Layouts,
    machine: MachineNumbers,
    parts: MemoryColumns,
    lora: Number,
) -> HostBytes:
    """Returns the bytes of a node's own memory; on processors ``parts`` are in it, too."""
    body, experts = rank_parameters(model, layouts, *first_rank(model, layouts))
    shards, sharded = layouts.dp * layouts.cp, layouts.zero >= 3
    spread = np.maximum(shards * layouts.tp / layouts.ep, 1.0)
    local = body / np.where(sharded, shards, 1) + experts / np.where(sharded, spread, 1)
    count = model.layer_parameters + model.expert_parameters + model.embedding_parameters
    learned = count * np.where(lora, LORA_SHARE, 1.0)
    largest = largest_weight(
        model.hidden, model.vocabulary, model.moe_layers, model.expert_parameters
    )
    on_host = machine.gloo
    share = RankShare(
        weights=FLOAT32 * local,
        largest=largest,
        part=largest * local / count,
        resting=on_host * (parts.weights + parts.optimizer),
        step=on_host * (parts.gradients + parts.activations + parts.logits),
        written=(FLOAT32 + MOMENTS_FLOAT32) * learned / layouts.devices,
        process=on_host * PROCESS + (1 - on_host) * DEVICE_PROCESS,
    )
    return host_bytes(share, machine.per_node)


def _rank_bytes(
    rank: PlannedRank,
    one: LayerBytes,
    model: ModelNumbers,
    layouts: Layouts,
    c: MemoryConstants,
    lora: Number,
) -> MemoryColumns:
    """Returns the bytes stored on a rank."""
    body, experts = rank_parameters(model, layouts, rank.layers, rank.ends)
    shards = layouts.dp * layouts.cp
    spread = np.maximum(shards * layouts.tp / layouts.ep, 1.0)

    def parameters_share(stage: int) -> Column:
        """Returns the rank's share of parameters if this ZeRO stage shards them."""
        sharded = layouts.zero >= stage
        return body / np.where(sharded, shards, 1) + experts / np.where(sharded, spread, 1)

    learns = np.where(lora, LORA_SHARE, 1.0)
    is_fp32 = layouts.precision == FP32
    layer = (body + experts) / np.maximum(rank.layers, 1)
    gathered = np.where(layouts.zero >= 3, 2 * layer, 0.0)  # the current layer and the next one
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
