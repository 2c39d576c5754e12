"""Compute seconds of a micro-batch, by kind of work; pipeline speed in closed form.

A product of T tokens with a K x N matrix requires 2TNK FLOPs, and moves its operands.
Relative to the first, the second has the weight (1/T + 1/N + 1/K) times the device's
FLOPs per byte. That term is why few tokens, and matrices that tensor parallelism makes
narrow, are slow. Flash attention runs at a share of the 16-bit peak that falls with
each generation. The reason is that exponentials didn't get faster as products did
(arXiv 2407.08608). Attention that writes its scores moves them through memory several
times.

Times are of the forward pass over one rank's share of each layer, as if the rank had
all layers. The function ``passes`` returns the number of times that the backward pass
and recomputation repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.planner.layout import (
    COMPRESSIONS,
    FP8,
    FP32,
    FULL,
    LIGHT,
    SELECTIVE,
    ZB2P,
    ZERO_BUBBLE,
    Column,
    Layouts,
)
from hasten.planner.memory import first_rank, rank_parameters
from hasten.planner.numbers import (
    COLUMNS,
    EXPERTS,
    ROWS,
    SLOTS,
    Constants,
    MachineNumbers,
    ModelNumbers,
    Number,
    element,
    stage_layers,
    tokens,
)

WHOLE_BITS = ("head", "router")  # products that are always in 16 bits
LATENT = ("q", "kv_up")  # up-projections of latent attention
# Elements that norms, residuals and rotary embedding read and write, per hidden or head dimension.
HIDDEN_PASSES, HEAD_PASSES = 14.0, 4.0
CAST_BYTES = 4.0  # bytes moved per element: two reads and two writes, transposed once
TILE = 128.0 * 256.0  # outputs that a multiprocessor computes at a time
ATTENTION_BACKWARD = 2.5  # five products backward for two forward


@dataclass(frozen=True)
class Forward:
    """Forward seconds of one micro-batch through all layers, and of the head."""

    products: Column
    experts: Column  # products of routed experts, and moving tokens to experts and back
    attention: Column
    elementwise: Column
    latent: Column  # part of ``products``: up-projections of latent attention
    fixed: Column  # per layer, forward and backward together
    head: Column  # forward and backward together


def rates(machine: MachineNumbers, layouts: Layouts, c: Constants) -> tuple[Column, Column]:
    """Returns FLOP/s of matrix products: in the layers' format, and in 16 bits for the head.

    A format that the device doesn't support has the rate of 16 bits.
    """
    newest, new = np.asarray(machine.peak4) > 0, np.asarray(machine.peak8) > 0
    share = np.where(newest, c.gemm16_newest, np.where(new, c.gemm16_new, c.gemm16))
    half = machine.best16 * share * np.ones(len(layouts))
    rate = half
    for code, other in ((FP8, machine.best8 * c.gemm8), (FP32, machine.best32 * share)):
        has_it = (layouts.precision == code) & (np.asarray(other) > 0)
        rate = np.where(has_it, other, rate)
    return np.asarray(rate), np.asarray(np.where(layouts.precision == FP32, rate, half))


def forward(
    model: ModelNumbers,
    machine: MachineNumbers,
    layouts: Layouts,
    c: Constants,
    lora: Number = False,
) -> Forward:
    """Returns the seconds of the forward pass of one micro-batch."""
    T, tp = tokens(model, layouts), layouts.tp
    rate, half = rates(machine, layouts, c)
    is_cast = layouts.precision == FP8  # operands, to 8 bits
    dense, expert, cast, head, latent = (np.zeros(len(T)) for _ in range(5))
    for index, slot in enumerate(SLOTS):
        count = model.counts[index]
        if not np.any(count):
            continue
        speed = half if slot in WHOLE_BITS else rate
        seconds = count * _product(index, model, machine, layouts, speed, c)
        if slot == "head":
            head = (1 + passes(lora)[0]) * seconds  # a frozen head has no gradient
            head = head + T * model.vocabulary / tp * c.loss_bytes / machine.memory_rate
        elif slot in EXPERTS:
            expert = expert + seconds * (1 + c.imbalance)
        else:
            dense = dense + seconds
            latent = latent + (seconds if slot in LATENT else 0.0)
        if slot not in WHOLE_BITS:  # a token is cast once, before it is sent to its experts
            rows = (
                T
                * (model.active if slot == "expert_down" else 1)
                / (tp if slot in EXPERTS or slot in ROWS else 1)
            )
            cast = cast + is_cast * count * rows * CAST_BYTES * model.inputs[index]
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
    """Returns the seconds of a slot's product in one layer.

    Multiprocessors compute tiles of outputs in rounds; half of the last round is idle on average.
    A rank's tokens are distributed over its experts, which tensor parallelism doesn't split.
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
    """Returns the bytes moved by norms, residuals, rotary embedding and activations."""
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
    """Returns the seconds of scores and values of all layers, forward, on one rank."""
    T, tp = tokens(model, layouts), layouts.tp
    width = model.heads * (model.query_width + model.value_width) / tp
    newest, new = np.asarray(machine.peak4) > 0, np.asarray(machine.peak8) > 0
    share = np.where(newest, c.attention_newest, np.where(new, c.attention_new, c.attention))
    head = np.maximum(model.value_width, 1)
    # Exponentials take the same time for any head width, and limit new devices: FP16 with width 64
    # has 0.6 to 0.8 of the rate with width 128 (arXiv 2407.08608, figure 5). At 128 it is 1.
    wait = np.where(new | newest, 128.0, 32.0)
    narrow = (1 + wait / 128) * head / (head + wait)
    flops = 2 * T * model.keys * width * model.layers
    peak = np.asarray(np.where(layouts.precision == FP32, machine.peak32, machine.peak16))
    fused = flops / (peak * share * np.minimum(narrow, np.where(new | newest, 1.3, 1.1)))
    scores: Column = T * model.sequence * model.heads / tp * model.layers
    odd = (np.mod(model.query_width, 8) > 0) | (np.mod(model.value_width, 8) > 0)
    slow = 1 + np.asarray(odd, dtype=np.float64) * (np.maximum(c.misaligned, 1.0) - 1)
    unfused_flops = 4 * T * model.sequence * width / 2 * model.layers
    written: Column = unfused_flops * slow / (peak * c.attention_unfused)
    written = written + scores * c.unfused_bytes / machine.memory_rate
    return np.asarray(np.where(layouts.flash > 0, fused, written))


def passes(lora: Number) -> tuple[Number, float]:
    """Returns backward / forward time of a layer's products and of its attention.

    Frozen weights have no gradients, which are half of the backward products.
    """
    return 2.0 - np.asarray(lora, dtype=np.float64), ATTENTION_BACKWARD


def again(part: Forward, layouts: Layouts, c: Constants) -> Column:
    """Returns the forward seconds that recomputation repeats."""
    other_seconds = part.products + part.experts + part.elementwise
    selective = part.attention * (1 - layouts.flash) + c.selective * other_seconds * layouts.flash
    some = np.where(layouts.recompute == SELECTIVE, selective, 0.0)
    some = np.where(layouts.recompute == LIGHT, part.elementwise + part.latent, some)
    return np.where(layouts.recompute == FULL, other_seconds + part.attention, some)


# The speed of a pipeline in closed form: its slowest stage, and the bubble.


def stage_seconds(
    layers: Number, layouts: Layouts, seconds: Number, head: Number
) -> tuple[Column, Column]:
    """Returns the seconds of the slowest and the mean stage for a micro-batch, both directions.

    ``seconds`` are those of all layers together; the last stage also has the head.
    """
    dealt = stage_layers(layers, layouts.pp, layouts.virtual)
    one = seconds / layers
    slow = np.maximum(dealt.most * one, dealt.last * one + head)
    mean = (seconds + head) / layouts.pp
    return np.where(layouts.pp > 1, np.maximum(slow, mean), mean), mean


def bubble_stages(layouts: Layouts) -> Column:
    """Returns the idle time in mean stage times, if backward takes twice as long as forward.

    - 1F1B and GPipe: (P-1)(F+B). Interleaved: 1/v of it (arXiv 2104.04473).
    - ZB1P, the zero bubble schedule: (P-1)(F+B-2W); ZB2P: none (arXiv 2401.10241).

    The values are F = W = B/2 = 1/3.
    """
    P, code = layouts.pp, layouts.schedule
    idle = (P - 1) / layouts.virtual
    idle = np.where(code == ZERO_BUBBLE, (P - 1) / 3, idle)
    return np.where(code == ZB2P, 0.0, idle)


# Seconds of communication between ranks, by kind, without any overlap.
#
# The order of ranks is Megatron's: tensor parallelism innermost, then context, data and pipeline.
# Ranks of an expert group are neighbours, because experts aren't split and tensor ranks share
# them. A group of neighbours within a node uses the node's links; a larger one uses network cards.
# A ring of n ranks sends (n-1)/n of the bytes once for a gather or a scatter, and twice for an
# all-reduce (arXiv 1909.09756, appendix; NCCL's bus bandwidth). A ring uses the cards of all its
# ranks in a node.

# Sent bytes of a gradient / its bytes in 16 bits; and passes over memory to encode and decode it.
COMMUNICATION = np.array([1.0, 0.5, 0.25, 0.02])
ENCODE = np.array([0.0, 3.0, 3.0, 8.0])
BUCKET = 25 * 2**20  # bytes of gradients in one message: the default of DistributedDataParallel
assert len(COMMUNICATION) == len(ENCODE) == len(COMPRESSIONS)


@dataclass(frozen=True)
class LinkSpeeds:
    """Speeds of one rank's group: bytes/s of a ring and seconds per hop."""

    rate: Column
    hop: Column


@dataclass(frozen=True)
class PlannedCommunication:
    """Seconds of communication: ``dp`` of a reduction, others of a micro-batch in all layers."""

    tp: Column
    cp: Column
    ep: Column
    pp: Column  # both directions over one boundary
    dp: Column  # per step, or per micro-batch if ``dp_each`` is 1
    dp_each: Column
    dp_last: Column  # share of ``dp`` that nothing can hide: the last bucket or layer
    encode: Column  # encoding and decoding, as often as ``dp``


def gather_seconds(size: Number, ranks: Number, rate: Number, hop: Number) -> Column:
    """Returns the seconds of a ring's all-gather or reduce-scatter of ``size`` bytes in total."""
    return np.asarray((ranks - 1) / ranks * size / rate + (ranks - 1) * hop)


def links(stride: Number, ranks: Number, machine: MachineNumbers, c: Constants) -> LinkSpeeds:
    """Returns the speeds of a group of ``ranks`` with the distance ``stride`` between ranks."""
    within = stride * ranks <= machine.per_node
    together = np.maximum(1.0, np.floor(machine.per_node / stride))
    # A ring over several nodes has one slow hop for each node.
    intra, inter = machine.intra * c.intra, machine.inter * c.inter
    rate = np.where(within, intra, np.minimum(intra, together * inter))
    nodes = np.maximum(1.0, ranks / together)
    slow = (machine.intra_latency * (ranks - nodes) + machine.inter_latency * nodes) / ranks
    return LinkSpeeds(rate, c.latency * np.where(within, machine.intra_latency, slow))


def communication(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants, lora: Number
) -> PlannedCommunication:
    """Returns the seconds of all communication of a step."""
    T, tp, cp = tokens(model, layouts), layouts.tp, layouts.cp
    size = element(layouts)
    activations = size * T * model.hidden  # bytes of one layer's input
    dp_seconds, each, last, encode = _gradients(model, machine, layouts, c, lora)
    # Two all-reduces forward, two backward, and two in a recomputed forward pass.
    rounds = np.where(layouts.recompute == FULL, 6.0, 4.0)
    ring = links(1.0, tp, machine, c)
    tensor = 2 * gather_seconds(activations, tp, ring.rate, ring.hop) * rounds * model.layers
    ring = links(tp, cp, machine, c)
    keys = size * T * cp * model.kv_width / tp
    context = 3 * gather_seconds(keys, cp, ring.rate, ring.hop) * model.layers
    return PlannedCommunication(
        tp=tensor,
        cp=context,
        ep=_experts(model, machine, layouts, c),
        pp=_boundary(activations, machine, layouts, c),
        dp=dp_seconds,
        dp_each=each,
        dp_last=last,
        encode=encode,
    )


def _boundary(
    activations: Column, machine: MachineNumbers, layouts: Layouts, c: Constants
) -> Column:
    """Returns the seconds to send activations and their gradients between two stages."""
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    near = layouts.devices <= machine.per_node
    rate = np.where(near, machine.intra * c.intra, machine.inter * c.inter)
    hop = np.where(near, machine.intra_latency, machine.inter_latency)
    return np.where(layouts.pp > 1, 2 * (activations / split / rate + hop), 0.0)


def _experts(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants
) -> Column:
    """Returns the seconds of expert communication: four exchanges per layer, both directions.

    A token is sent to each node once, for all of its experts on that node (DeepEP), and then
    forwarded within the node. Of n nodes, k random experts reach n (1 - (1 - 1/n)^k). Routing
    limited to some groups of experts reaches at most that number of nodes.
    """
    T, ep = tokens(model, layouts), layouts.ep
    if not np.any(model.moe_layers):
        return np.zeros(len(T))
    rows = T / layouts.tp
    together = np.minimum(ep, machine.per_node)
    nodes = np.maximum(1.0, ep / together)
    reach = np.minimum(nodes, model.groups)
    met = reach * (1 - (1 - 1 / reach) ** model.active)
    token = element(layouts) * model.hidden
    far = rows * met * (nodes - 1) / nodes * token / (machine.inter * c.inter)
    near = rows * model.active * (together - 1) / together
    near = near * token / (machine.intra * c.intra)
    hop = np.where(nodes > 1, machine.inter_latency, machine.intra_latency) * np.sqrt(ep)
    seconds = 4 * model.moe_layers * (far + near + hop)
    return np.where(ep > 1, seconds, 0.0)


def _gradients(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants, lora: Number
) -> tuple[Column, Column, Column, Column]:
    """Returns data-parallel communication: ``dp``, ``dp_each``, ``dp_last`` and ``encode``.

    ZeRO 3 gathers weights for the forward and the backward pass, and scatters gradients.
    ZeRO 2 gathers only once. Both do it for every micro-batch. Without them, gradients are
    reduced once a step (arXiv 1910.02054, section 7). In gloo a reduce-scatter is an
    all-reduce with twice the bytes (torch's ProcessGroupGloo), and gathers don't overlap.
    """
    tp, ep = layouts.tp, layouts.ep
    # The few gradients of a LoRA aren't counted, and aren't compressed.
    code = np.where(lora, 0.0, layouts.compression).astype(int)
    visits = ENCODE[code]
    shards = layouts.dp * layouts.cp
    ring = links(tp, shards, machine, c)
    body, rare = rank_parameters(model, layouts, *first_rank(model, layouts))
    replicas = np.maximum(shards * tp / ep, 1.0)
    expert_ring = links(ep, replicas, machine, c)
    shards_weights = layouts.zero >= 3
    gathers = np.where(shards_weights, 2.0, 1.0)
    # Sums over micro-batches have fp32; other tensors have the layout's precision.
    whole_width = element(layouts) / 2
    width = np.where(layouts.zero >= 2, whole_width, 2.0)
    sent = np.where(code > 0, COMMUNICATION[code], width)

    scattered = sent * np.where((layouts.zero >= 2) & (machine.gloo > 0), 2.0, 1.0)

    def exchange(parameters: Column, ranks: Column, speeds: LinkSpeeds) -> Column:
        ways = np.where(layouts.zero > 0, gathers * whole_width, sent) + scattered
        # ZeRO 3 communicates each layer separately.
        times = np.where(shards_weights, model.layers / layouts.pp, 1.0)
        hops = (gathers + 1) * (ranks - 1) * speeds.hop * times
        return np.asarray(2 * parameters * ways * (ranks - 1) / ranks / speeds.rate + hops)

    seconds = exchange(body, shards, ring) + exchange(rare, replicas, expert_ring)
    # A frozen base is only gathered.
    seconds = seconds * np.where(lora, np.where(shards_weights, 2 / 3, 0.0), 1.0)
    encode = visits * 2 * (body + rare) / machine.memory_rate
    each = layouts.zero >= 2
    bucket = np.minimum(BUCKET / (2 * sent * (body + rare)), 1.0)
    last = np.where(each, np.where(machine.gloo > 0, 1.0, layouts.pp / model.layers), bucket)
    coded = np.where(shards > 1, encode, 0.0)
    return seconds, each.astype(np.float64), np.minimum(last, 1.0), coded
