"""Seconds that a micro-batch computes, by kind of work; and a pipeline's pace in closed form.

A product of T tokens with a K x N matrix owes 2TNK FLOPs, and moves its operands: relative to the
first the second weighs (1/T + 1/N + 1/K) times the device's FLOPs per byte. That term is why few
tokens and matrices cut thin by tensor parallelism are slow. Flash attention runs at a share of the
16-bit peak that falls with each generation, since exponentials didn't get faster as products did
(arXiv 2407.08608); attention that writes its scores moves them through memory several times.

Times are of the forward pass over one rank's share of each layer, as if it had all layers;
``passes`` says how often the backward pass and recomputation repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.planner.layout import PRECISIONS, RECOMPUTE, SCHEDULES, Column, Layouts
from hasten.planner.numbers import (
    COLUMNS,
    EXPERTS,
    ROWS,
    SLOTS,
    Constants,
    MachineNumbers,
    ModelNumbers,
    Value,
)

FP8, MXFP8, NVFP4, FP32 = (PRECISIONS.index(p) for p in ("fp8", "mxfp8", "nvfp4", "fp32"))
WHOLE_BITS = ("head", "router")  # products that stay in 16 bits
LATENT = ("q", "kv_up")  # from low ranks to heads, in latent attention
SELECTIVE, FULL, LIGHT = (RECOMPUTE.index(r) for r in ("selective", "full", "light"))
# Elements that norms, residuals and rotary embedding read and write, per hidden or head dimension.
HIDDEN_PASSES, HEAD_PASSES = 14.0, 4.0
CAST_BYTES = 4.0  # of an element: read, written, and once more the other way round
TILE = 128.0 * 256.0  # outputs that a multiprocessor takes at a time
ATTENTION_BACKWARD = 2.5  # five products where forward has two


@dataclass(frozen=True)
class Forward:
    """Forward seconds of one micro-batch through all layers, and of the head."""

    products: Column
    experts: Column  # their products, and carrying tokens to them and back
    attention: Column
    elementwise: Column
    latent: Column  # of products: those that make latent attention's heads from its low ranks
    fixed: Column  # per layer, forward and backward together
    head: Column  # forward and backward together


def tokens(model: ModelNumbers, layouts: Layouts) -> Column:
    """Tokens of one micro-batch on one rank."""
    return np.asarray(layouts.micro_batch * model.sequence / layouts.cp)


def element(layouts: Layouts) -> Column:
    """Bytes of an activation or a weight as software reads, writes and sends it."""
    return np.where(layouts.precision == FP32, 4.0, 2.0)


def rates(machine: MachineNumbers, layouts: Layouts, c: Constants) -> tuple[Column, Column]:
    """FLOP/s of matrix products: of the layers in their format, of the head in 16 bits.

    A format that the device lacks runs as 16 bits; ``predict`` gives such a layout its reason.
    """
    newest, new = np.asarray(machine.peak4) > 0, np.asarray(machine.peak8) > 0
    share = np.where(newest, c.gemm16_newest, np.where(new, c.gemm16_new, c.gemm16))
    half = machine.best16 * share * np.ones(len(layouts))
    by_format = (
        (FP8, machine.best8 * c.gemm8),
        (MXFP8, machine.best8 * c.gemm8_blocks),
        (NVFP4, machine.peak4 * c.gemm4),
        (FP32, machine.best32 * share),
    )
    rate = half
    for code, other in by_format:
        has_it = (layouts.precision == code) & (np.asarray(other) > 0)
        rate = np.where(has_it, other, rate)
    return np.asarray(rate), np.asarray(np.where(layouts.precision == FP32, rate, half))


def low_bits(layouts: Layouts) -> Column:
    """1 where the layers' operands are cast to 8 bits or fewer."""
    p = layouts.precision
    return np.asarray((p == FP8) | (p == MXFP8) | (p == NVFP4), dtype=np.float64)


def forward(
    model: ModelNumbers,
    machine: MachineNumbers,
    layouts: Layouts,
    c: Constants,
    lora: Value = False,
) -> Forward:
    """The forward pass of one micro-batch."""
    T, tp = tokens(model, layouts), layouts.tp
    rate, half = rates(machine, layouts, c)
    dense, expert, cast, head, latent = (np.zeros(len(T)) for _ in range(5))
    for index, slot in enumerate(SLOTS):
        count = model.counts[index]
        if not np.any(count):
            continue
        speed = half if slot in WHOLE_BITS else rate
        seconds = count * _product(index, model, machine, layouts, speed, c)
        if slot == "head":
            head = (1 + passes(lora)[0]) * seconds  # a frozen head has no gradient of its own
            head = head + T * model.vocabulary / tp * c.loss_bytes / machine.memory_rate
        elif slot in EXPERTS:
            expert = expert + seconds * (1 + c.imbalance)
        else:
            dense = dense + seconds
            latent = latent + (seconds if slot in LATENT else 0.0)
        if slot not in WHOLE_BITS:  # a token is cast once, before it goes to its experts
            rows = (
                T
                * (model.active if slot == "expert_down" else 1)
                / (tp if slot in EXPERTS or slot in ROWS else 1)
            )
            cast = cast + low_bits(layouts) * count * rows * CAST_BYTES * model.inputs[index]
    if np.any(model.moe_layers):
        moved = 2 * element(layouts) * c.permute * T * model.active / tp * model.hidden
        expert = expert + model.moe_layers * moved / machine.memory_rate
    passing = _passing(model, layouts) * c.elementwise + cast * c.cast
    return Forward(
        products=dense,
        experts=expert,
        attention=_attention(model, machine, layouts, c),
        elementwise=passing / machine.memory_rate,
        latent=np.where(np.asarray(model.counts[SLOTS.index("kv_up")]) > 0, latent, 0.0),
        fixed=model.layers * c.layer_seconds + model.moe_layers * c.expert_seconds + 0 * T,
        head=head,
    )


def _product(
    index: int,
    model: ModelNumbers,
    machine: MachineNumbers,
    layouts: Layouts,
    rate: Column,
    c: Constants,
) -> Column:
    """Seconds of a slot's product in one layer.

    Tiles of outputs go to the multiprocessors round by round; half of the last round is idle on
    average. A rank's tokens spread over its experts, which tensor parallelism doesn't cut.
    """
    slot, T, tp = SLOTS[index], tokens(model, layouts), layouts.tp
    rows = each = T
    if slot in EXPERTS:
        rows = T * model.active / tp
        each = np.maximum(rows * layouts.ep / model.experts, 1.0)
    K = np.maximum(model.inputs[index] / (tp if slot in ROWS else 1), 1)
    N = np.maximum(model.outputs[index] / (tp if slot in COLUMNS else 1), 1)
    idle = c.waves * machine.units * TILE / rows / 2 * (1 / N + 1 / K)
    bytes_ = element(layouts) / 2 * rate / machine.memory_rate
    moved = c.small * (c.rows / each + 1 / K + 1 / N) * bytes_
    return np.asarray(2 * rows * K * N / rate * (1 + idle + moved))


def _passing(model: ModelNumbers, layouts: Layouts) -> Column:
    """Bytes that norms, residuals, rotary embedding and activations move, all layers."""
    T, tp = tokens(model, layouts), layouts.tp
    split = np.where(layouts.sequence_parallel > 0, tp, 1)
    heads = model.heads * model.query_width + model.kv_width / 2
    wide = 0.0
    for slot, share in (("down", T), ("shared_down", T), ("expert_down", T * model.active)):
        index = SLOTS.index(slot)
        wide = wide + share * model.gate * model.inputs[index] * model.counts[index]
    narrow = T * model.layers * (HIDDEN_PASSES * model.hidden / split + HEAD_PASSES * heads / tp)
    return np.asarray(element(layouts) * (narrow + wide / tp))


def _attention(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants
) -> Column:
    """Scores and values of all layers, forward, on one rank."""
    T, tp = tokens(model, layouts), layouts.tp
    width = model.heads * (model.query_width + model.value_width) / tp
    newest, new = np.asarray(machine.peak4) > 0, np.asarray(machine.peak8) > 0
    share = np.where(newest, c.attention_newest, np.where(new, c.attention_new, c.attention))
    head = np.maximum(model.value_width, 1)
    # Exponentials take the same whatever a head's width, and new devices wait for them: FP16 and
    # 64 wide runs at 0.6 to 0.8 of the rate at 128 there (arXiv 2407.08608, figure 5). 1 at 128.
    wait = np.where(new | newest, 128.0, 32.0)
    narrow = (1 + wait / 128) * head / (head + wait)
    flops = 2 * T * model.keys * width * model.layers
    peak = np.asarray(np.where(layouts.precision == FP32, machine.peak32, machine.peak16))
    fused = flops / (peak * share * np.minimum(narrow, np.where(new | newest, 1.3, 1.1)))
    scores: Column = T * model.sequence * model.heads / tp * model.layers
    odd = (np.mod(model.query_width, 8) > 0) | (np.mod(model.value_width, 8) > 0)
    slow = 1 + np.asarray(odd, dtype=np.float64) * (np.maximum(c.misaligned, 1.0) - 1)
    whole = 4 * T * model.sequence * width / 2 * model.layers
    written: Column = whole * slow / (peak * c.attention_unfused)
    written = written + scores * c.unfused_bytes / machine.memory_rate
    return np.asarray(np.where(layouts.flash > 0, fused, written))


def passes(lora: Value) -> tuple[Value, float]:
    """How often a layer's products and its attention run backward, for one forward pass.

    Frozen weights need no gradient of their own: half of the backward products.
    """
    return 2.0 - np.asarray(lora, dtype=np.float64), ATTENTION_BACKWARD


def again(part: Forward, layouts: Layouts, c: Constants) -> Column:
    """Forward seconds that recomputation repeats."""
    rest = part.products + part.experts + part.elementwise
    selective = part.attention * (1 - layouts.flash) + c.selective * rest * layouts.flash
    some = np.where(layouts.recompute == SELECTIVE, selective, 0.0)
    some = np.where(layouts.recompute == LIGHT, part.elementwise + part.latent, some)
    return np.where(layouts.recompute == FULL, rest + part.attention, some)


# A pipeline's pace in closed form: its slowest stage, and the idle time at its two ends.

ZB1P, ZB2P, DUALPIPE = (SCHEDULES.index(s) for s in ("zb1p", "zb2p", "dualpipe"))


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first stage, of the fullest and of the last, a rank's chunks together."""

    first: Column
    most: Column
    last: Column


def stage_layers(layers: Value, stages: Value, virtual: Value) -> StageLayers:
    """Layers dealt evenly; where that doesn't go, embedding and head count as a layer each.

    So 126 layers make 128 stages of which the first and the last have one layer fewer (Llama 3,
    arXiv 2407.21783, section 3.3.2). Where that doesn't go either, the last stage gets what is
    left. Without stages all three are all layers.
    """
    virtual = np.where(np.asarray(stages) > 1, virtual, 1)
    chunks = stages * virtual
    most = np.ceil(layers / chunks) * virtual
    ends = (np.mod(layers, chunks) > 0) & (np.mod(layers + 2, chunks) == 0)
    left = np.maximum(layers - most * (stages - 1), 0)
    return StageLayers(np.where(ends, most - 1, most), most, np.where(ends, most - 1, left))


def stage_seconds(
    model: ModelNumbers, layouts: Layouts, layers: Column, head: Column
) -> tuple[Column, Column]:
    """Seconds of the slowest stage and of the mean one for a micro-batch, both directions.

    ``layers`` are those of all layers together; the last stage has the head as well.
    """
    dealt = stage_layers(model.layers, layouts.pp, layouts.virtual)
    one = layers / model.layers
    slow = np.maximum(dealt.most * one, dealt.last * one + head)
    mean = (layers + head) / layouts.pp
    return np.where(layouts.pp > 1, np.maximum(slow, mean), mean), mean


def bubble_stages(layouts: Layouts) -> Column:
    """Idle time in mean stage times, with a backward pass of two forward passes' length.

    1F1B and GPipe (P-1)(F+B), interleaved a v-th of it (arXiv 2104.04473), ZB1P (P-1)(F+B-2W)
    (arXiv 2401.10241), DualPipe (P/2-1)(F&B+B-3W) (arXiv 2412.19437); F = W = B/2 = 1/3.
    """
    P, code = layouts.pp, layouts.schedule
    idle = (P - 1) / layouts.virtual
    idle = np.where(code == ZB1P, (P - 1) / 3, idle)
    idle = np.where(code == ZB2P, 0.0, idle)
    return np.where(code == DUALPIPE, np.maximum(P / 2 - 1, 0) * 2 / 3, idle)
