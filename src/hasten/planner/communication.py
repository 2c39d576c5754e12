"""Seconds that ranks spend on telling each other things, by kind, before any of it is hidden.

Ranks are laid out as Megatron does: tensor parallelism innermost, then context, data and pipeline;
those of an expert group are neighbours, since experts aren't cut and tensor ranks share them.
So a group of neighbours that fits into a node uses the link within it; a wider one goes through the
nodes' network cards. A ring of n ranks carries (n-1)/n of the bytes once for a gather or a scatter
and twice for an all-reduce (arXiv 1909.09756, appendix; NCCL's bus bandwidth). Where several ranks
of a node belong to one ring, all their cards work for it; where each belongs to a ring of its own,
each ring has its own card.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hasten.planner.compute import FULL, element, tokens
from hasten.planner.layout import COMPRESSIONS, Column, Layouts
from hasten.planner.memory import first_rank, rank_parameters
from hasten.planner.numbers import Constants, MachineNumbers, ModelNumbers, Value

# What travels of a gradient over its 16 bits, however wide its sum is kept; and passes over it in
# memory to encode and decode.
WIRE = np.array([1.0, 0.5, 0.25, 0.02])
ENCODE = np.array([0.0, 3.0, 3.0, 8.0])
BUCKET = 25 * 2**20  # bytes of gradients that leave together, as DistributedDataParallel has it
assert len(WIRE) == len(ENCODE) == len(COMPRESSIONS)


@dataclass(frozen=True)
class LinkSpeeds:
    """What one rank's group reaches: bytes/s of a ring and seconds per hop."""

    rate: Column
    hop: Column


@dataclass(frozen=True)
class PlannedWire:
    """Seconds on the wire: of one micro-batch through all layers, and ``dp`` of one exchange."""

    tp: Column
    cp: Column
    ep: Column
    pp: Column  # both ways over one boundary
    dp: Column  # of a step, or of a micro-batch where ``dp_each`` is 1
    dp_each: Column
    dp_last: Column  # share of ``dp`` that comes when all else is done: the last bucket, or layer
    encode: Column  # of one exchange, as ``dp``


def gather_seconds(size: Value, ranks: Value, rate: Value, hop: Value) -> Column:
    """A ring's all-gather or reduce-scatter of ``size`` bytes in all; an all-reduce is two."""
    return np.asarray((ranks - 1) / ranks * size / rate + (ranks - 1) * hop)


def links(stride: Value, ranks: Value, machine: MachineNumbers, c: Constants) -> LinkSpeeds:
    """A group of ``ranks`` that stand ``stride`` apart in the order of ranks."""
    within = stride * ranks <= machine.per_node
    together = np.maximum(1.0, np.floor(machine.per_node / stride))
    # Hops within a node are quick; a ring over nodes has as many slow ones as it has nodes.
    intra, inter = machine.intra * c.intra, machine.inter * c.inter
    rate = np.where(within, intra, np.minimum(intra, together * inter))
    nodes = np.maximum(1.0, ranks / together)
    slow = (machine.intra_latency * (ranks - nodes) + machine.inter_latency * nodes) / ranks
    return LinkSpeeds(rate, c.latency * np.where(within, machine.intra_latency, slow))


def wire(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants, lora: Value
) -> PlannedWire:
    """All of a step's exchanges."""
    T, tp, cp = tokens(model, layouts), layouts.tp, layouts.cp
    size = element(layouts)
    activations = size * T * model.hidden  # bytes of one layer's input
    dp_seconds, each, last, encode = _gradients(model, machine, layouts, c, lora)
    # Two all-reduces forward, two backward, and those of the forward that is done again.
    rounds = np.where(layouts.recompute == FULL, 6.0, 4.0)
    ring = links(1.0, tp, machine, c)
    tensor = 2 * gather_seconds(activations, tp, ring.rate, ring.hop) * rounds * model.layers
    ring = links(tp, cp, machine, c)
    keys = size * T * cp * model.kv_width / tp
    context = 3 * gather_seconds(keys, cp, ring.rate, ring.hop) * model.layers
    return PlannedWire(
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
    """Activations forward and their gradients backward between two stages."""
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    near = layouts.devices <= machine.per_node
    rate = np.where(near, machine.intra * c.intra, machine.inter * c.inter)
    hop = np.where(near, machine.intra_latency, machine.inter_latency)
    return np.where(layouts.pp > 1, 2 * (activations / split / rate + hop), 0.0)


def _experts(
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants
) -> Column:
    """Tokens to their experts and back, forward and backward: four exchanges a layer.

    A token goes to each node once, however many of its experts live there (DeepEP); within the
    node it is passed on. Of n nodes, k experts chosen at random meet n (1 - (1 - 1/n)^k); routing
    that is limited to some groups of experts meets as many nodes at most.
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
    model: ModelNumbers, machine: MachineNumbers, layouts: Layouts, c: Constants, lora: Value
) -> tuple[Column, Column, Column, Column]:
    """Data parallelism's exchange, whether each micro-batch has it, its end, and encoding.

    ZeRO 3 gathers weights for the forward and the backward pass and scatters gradients, ZeRO 2
    does without the second gathering, and both do it for every micro-batch; below that gradients
    are exchanged once a step (arXiv 1910.02054, section 7). Over gloo a reduce-scatter is an
    all-reduce of which each rank keeps a part (torch's ProcessGroupGloo), twice the bytes, and
    what is gathered is waited for at once.
    """
    tp, ep = layouts.tp, layouts.ep
    # A LoRA has too few gradients of its own to count, so none to compress.
    code = np.where(lora, 0.0, layouts.compression).astype(int)
    visits = ENCODE[code]
    shards = layouts.dp * layouts.cp
    ring = links(tp, shards, machine, c)
    body, rare = rank_parameters(model, layouts, *first_rank(model, layouts))
    replicas = np.maximum(shards * tp / ep, 1.0)
    expert_ring = links(ep, replicas, machine, c)
    whole = layouts.zero >= 3
    gathers = np.where(whole, 2.0, 1.0)
    # Sums over micro-batches are kept in fp32; with no 16 bits anywhere, so is all else.
    whole_width = element(layouts) / 2
    width = np.where(layouts.zero >= 2, whole_width, 2.0)
    sent = np.where(code > 0, WIRE[code], width)

    scattered = sent * np.where((layouts.zero >= 2) & (machine.gloo > 0), 2.0, 1.0)

    def exchange(parameters: Column, ranks: Column, found: LinkSpeeds) -> Column:
        ways = np.where(layouts.zero > 0, gathers * whole_width, sent) + scattered
        times = np.where(whole, model.layers / layouts.pp, 1.0)  # each of a rank's layers by itself
        hops = (gathers + 1) * (ranks - 1) * found.hop * times
        return np.asarray(2 * parameters * ways * (ranks - 1) / ranks / found.rate + hops)

    seconds = exchange(body, shards, ring) + exchange(rare, replicas, expert_ring)
    # A frozen base is gathered and nothing else.
    seconds = seconds * np.where(lora, np.where(whole, 2 / 3, 0.0), 1.0)
    encode = visits * 2 * (body + rare) / machine.memory_rate
    each = layouts.zero >= 2
    bucket = np.minimum(BUCKET / (2 * sent * (body + rare)), 1.0)
    last = np.where(each, np.where(machine.gloo > 0, 1.0, layouts.pp / model.layers), bucket)
    coded = np.where(shards > 1, encode, 0.0)
    return seconds, each.astype(np.float64), np.minimum(last, 1.0), coded
