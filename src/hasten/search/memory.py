"""Bytes that a layout keeps on its fullest rank: state, activations, logits, and the rest.

Weights take 2 bytes, gradients 4 where they are summed in fp32 over micro-batches and 2 where they
are sharded at once, AdamW 12 with its fp32 master weights (arXiv 1910.02054, section 3). Kept
activations are counted from what the backward pass of each product and each norm needs, as in
arXiv 2205.05198; the schedule says how many micro-batches are kept at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.search.compute import FULL, SELECTIVE, tokens
from hasten.search.constants import MemoryConstants
from hasten.search.layout import SCHEDULES, Column, Layouts
from hasten.search.quantities import SLOTS, ModelNumbers, Value

GPIPE, INTERLEAVED, DUALPIPE, ZB2P = (
    SCHEDULES.index(s) for s in ("gpipe", "interleaved", "dualpipe", "zb2p")
)
SELECTIVE_KEEPS = 0.5  # every other product's result, as torchtitan does
LORA_SHARE = 0.005  # of the weights, in adapters that learn


@dataclass(frozen=True)
class Memory:
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


def rank_parameters(model: ModelNumbers, layouts: Layouts) -> tuple[Column, Column]:
    """Parameters of the fullest stage's rank before data parallelism shards: rest, and experts."""
    stages = layouts.pp * layouts.virtual
    share = np.ceil(model.layers / stages) * layouts.virtual / model.layers
    ends = np.where(layouts.pp > 1, model.vocabulary * model.hidden, model.embedding_parameters)
    doubled = np.where(layouts.schedule == DUALPIPE, 2.0, 1.0)
    body = (model.layer_parameters * share + ends) / layouts.tp * doubled
    return body, model.expert_parameters * share / layouts.ep * doubled


def memory(
    model: ModelNumbers, layouts: Layouts, micro_batches: Value, c: MemoryConstants, lora: Value
) -> Memory:
    """What stays on the fullest rank at its worst moment."""
    body, experts = rank_parameters(model, layouts)
    shards = layouts.dp * layouts.cp
    spread = np.maximum(shards * layouts.tp / layouts.ep, 1.0)

    def held(stage: int) -> Column:
        """The rank's share of parameters, with what that ZeRO stage shards dealt out."""
        sharded = layouts.zero >= stage
        return body / np.where(sharded, shards, 1) + experts / np.where(sharded, spread, 1)

    learns = np.where(lora, LORA_SHARE, 1.0)
    layer = (body + experts) / np.maximum(np.ceil(model.layers / layouts.pp), 1)
    gathered = np.where(layouts.zero >= 3, 2 * 2 * layer, 0.0)
    gradient = np.where(layouts.zero >= 2, 2.0, 4.0)
    kept, working = _layer_bytes(model, layouts)
    stage_layers = np.ceil(model.layers / (layouts.pp * layouts.virtual)) * layouts.virtual
    flight = in_flight(layouts, micro_batches)
    activations = c.activations * kept * stage_layers * flight + c.working * working
    T = tokens(model, layouts)
    logits = T * model.vocabulary / layouts.tp * c.logits
    # The last stage has the logits and one micro-batch, the first has none and many.
    last = c.activations * kept * stage_layers + c.working * working + logits
    several = layouts.pp > 1
    on_first = several & (activations >= last)
    return Memory(
        weights=c.state * (2 * held(3) + gathered),
        gradients=c.state * gradient * held(2) * learns,
        optimizer=c.state * 12 * held(1) * learns,
        activations=np.where(several & ~on_first, last - logits, activations),
        logits=np.where(on_first, 0.0, logits),
        overhead=c.context * 1e9 + 0 * T,
    )


def in_flight(layouts: Layouts, micro_batches: Value) -> Column:
    """Micro-batches whose activations the fullest stage keeps, in units of all its layers."""
    pp, v = layouts.pp, layouts.virtual
    most = np.where(layouts.schedule == INTERLEAVED, pp * (1 + (pp - 1) / (pp * v)), pp)
    most = np.where(layouts.schedule == DUALPIPE, pp + 1, most)
    most = np.where(layouts.schedule == ZB2P, 2 * pp - 1, most)
    most = np.where(layouts.schedule == GPIPE, micro_batches, most)
    return np.asarray(np.minimum(np.where(pp > 1, most, 1.0), micro_batches))


def _expanded(model: ModelNumbers) -> Column:
    """Dimensions of latent attention that are made anew from its low ranks: queries, keys, values.

    DeepSeek-V3 recomputes its up-projections (arXiv 2412.19437, section 3.2.3).
    """
    ranks = sum(model.outputs[SLOTS.index(slot)] for slot in ("q_down", "kv_down"))
    wide = model.heads * model.query_width + model.kv_width - ranks
    return np.asarray(np.where(ranks > 0, np.maximum(wide, 0), 0.0))


def _layer_bytes(model: ModelNumbers, layouts: Layouts) -> tuple[Column, Column]:
    """Bytes that one layer keeps for one micro-batch, and that it needs while it is at work."""
    T, tp = tokens(model, layouts), layouts.tp
    split = np.where(layouts.sequence_parallel > 0, tp, 1)
    heads = model.heads * (model.query_width + model.value_width) + model.kv_width
    wide = 0.0
    for slot, share in (("down", 1.0), ("shared_down", 1.0), ("expert_down", model.active)):
        index = SLOTS.index(slot)
        wide = wide + share * model.gate * model.inputs[index] * model.counts[index]
    routed = 2 * model.active * model.hidden * model.moe_layers / model.layers
    narrow = 4 * model.hidden / split + (heads + wide / model.layers + routed) / tp
    scores = 5 * T * model.sequence * model.heads / tp * (1 - layouts.flash)
    whole = 2 * T * narrow + scores
    boundary = 2 * T * model.hidden / split
    less = np.where(layouts.flash > 0, SELECTIVE_KEEPS, 1.0)
    fewer = less * 2 * T * (narrow - _expanded(model) / tp)
    kept = np.where(layouts.recompute == SELECTIVE, fewer, whole)
    kept = np.where(layouts.recompute == FULL, boundary, kept)
    return kept, whole
