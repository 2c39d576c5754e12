"""Bytes of activations: what a layer keeps of one micro-batch, and what it needs while at work.

Counted from what the backward pass of each product and each norm needs, as in arXiv 2205.05198. By
the word of a layout's ``recompute``:

    none       inputs of norms and products, queries, keys, values, the MLP's two sides
    light      norms, activation functions and the up-projections of latent attention are computed
               again, so their results go (DeepSeek-V3, arXiv 2412.19437, section 3.2.3; Megatron
               Core's recompute modules layernorm, moe_act and mla_up_proj)
    selective  results of every other product, as torchtitan does; without flash attention, all but
               the scores (arXiv 2205.05198)
    full       a layer's input alone

Products in fewer than 16 bits keep their inputs in that format, which their weights' gradient is
computed from; under ``light`` the two inputs of a gated activation too, and what attention returns
in 12 bits (arXiv 2412.19437, section 3.3.3). What attention and norms need stays in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.planner.compute import FULL, LIGHT, SELECTIVE, tokens
from hasten.planner.layout import PRECISIONS, Column, Layouts
from hasten.planner.numbers import SLOTS, ModelNumbers, Value

SELECTIVE_KEEPS = 0.5
# Bytes of an element that a product's input is kept in: a scale per 32 or per 128 of them is in it.
_KEPT_BYTES = {"fp8": 1.03, "mxfp8": 1.03, "nvfp4": 0.5625, "fp32": 4.0}
KEPT_BYTES = np.array([_KEPT_BYTES.get(name, 2.0) for name in PRECISIONS])


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one micro-batch: kept by a plain layer, by one with experts; at work."""

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
        """Elements of queries, keys and values that latent attention makes anew from fewer."""
        more = np.maximum(self.heads - self.latent, 0.0)
        return np.asarray(np.where(self.latent > 0, more, 0.0))

    def whole(self, size: Value) -> Column:
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
    """What one layer keeps for one micro-batch, and what it needs while it is at work."""
    T = tokens(model, layouts)
    size = KEPT_BYTES[layouts.precision.astype(int)]
    scores = 5 * T * model.sequence * model.heads / layouts.tp * (1 - layouts.flash)
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    broad = np.maximum(size, 2.0)  # bytes of what is never kept in fewer than 16 bits
    boundary = broad * T * model.hidden / split
    kept, largest = [], np.zeros(len(T))
    for made in (_elements(model, layouts, False), _elements(model, layouts, True)):
        whole = T * made.whole(size) + scores
        # Latent attention goes back to its low ranks.
        fewer = made.whole(broad) - broad * made.expanded
        fewer = np.where(layouts.flash > 0, SELECTIVE_KEEPS, 1.0) * T * fewer
        found = np.where(layouts.recompute == SELECTIVE, fewer, whole)
        found = np.where(layouts.recompute == LIGHT, T * made.light(size) + scores, found)
        found = np.where(layouts.recompute == FULL, boundary, found)
        kept.append(np.where(made.stream > 0, found, 0.0))
        # Softmax, mask and gradients of scores pass through memory beside what is kept of them.
        largest = np.maximum(largest, T * made.whole(size) + 2 * scores)
    return LayerBytes(kept[0], kept[1], largest)


def _elements(model: ModelNumbers, layouts: Layouts, expert: bool) -> _Elements:
    """Of a layer with a plain MLP, or of one with experts; nothing of its MLP where there is none.

    A slot's width is that of the layers that have it, so no average is taken.
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
    there = np.where(has, 1.0, 0.0)
    return _Elements(
        stream=there * base,
        normed=there * base,
        heads=there * heads / tp,
        latent=there * ranks,
        attended=there * model.heads * model.value_width / tp,
        wide=there * width * (model.gate - 1) / tp,
        active=there * width / tp,
        routed=there * routed / tp,
    )
