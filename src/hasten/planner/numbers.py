"""Models, clusters and the cost model's constants as plain numbers.

One formula serves one case or thousands of rows. Every field of a model or machine is a
float, or an array with one entry per row. The function ``numbers`` returns the floats
of an architecture. Its matrices become columns in a fixed order.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import FP32, Column, Layouts

Number = Any  # a float or a Column, which all formulas accept
SLOTS = (
    *("qkv", "q_down", "q", "kv_down", "kv_up", "attention_out", "up", "down"),
    *("compress_1", "compress_2", "group_out"),
    *("router", "expert_up", "expert_down", "shared_up", "shared_down", "head"),
)
# The split of a slot is the same in every model; see ``architecture.Cut``.
COLUMNS = frozenset({"qkv", "q", "kv_up", "up", "shared_up", "head"})
ROWS = frozenset({"attention_out", "group_out", "down", "shared_down"})
EXPERTS = frozenset({"expert_up", "expert_down"})


@dataclass(frozen=True)
class ModelNumbers:
    """An architecture at a sequence length; matrices as (inputs, outputs, layers) per slot."""

    layers: Number
    hidden: Number
    heads: Number
    kv_width: Number  # width of a token's keys and values, over all heads
    query_width: Number
    value_width: Number
    sequence: Number
    keys: Number  # mean number of keys per query
    chosen: Number  # keys that an indexer chooses for a query and a layer stores; 0 without one
    vocabulary: Number
    tied: Number
    gate: Number  # passes over the MLP's width: 3 if it is gated, else 2
    experts: Number
    active: Number
    groups: Number  # nodes that a token may use; infinite if routing doesn't limit them
    moe_layers: Number
    layer_parameters: Number  # parameters of all layers, without routed experts
    expert_parameters: Number
    embedding_parameters: Number  # parameters of embedding and head; tied ones count once
    training_flops: Number  # per token
    inputs: Number  # (positions,) or (positions, rows)
    outputs: Number
    counts: Number  # number of layers with this matrix


@dataclass(frozen=True)
class MachineNumbers:
    """A cluster's figures."""

    peak16: Number
    best16: Number
    best8: Number
    peak8: Number
    peak4: Number
    peak32: Number
    best32: Number
    memory_bytes: Number
    memory_rate: Number
    per_node: Number
    units: Number
    devices: Number
    intra: Number
    inter: Number
    intra_latency: Number
    inter_latency: Number
    host_memory: Number  # bytes of a node
    gloo: Number  # 1: a reduce-scatter is an all-reduce, and gathers aren't hidden


def numbers(model: Architecture, sequence: int) -> ModelNumbers:
    """Returns the model at a sequence length as floats."""
    by_name = {matrix.name: matrix for matrix in model.matrices()}
    experts = float(model.expert_parameters())
    embedding = float(model.vocabulary * model.hidden * (1 if model.tied else 2))
    kv = model.kv_heads * (model.query_width + model.value_width)
    indexer = model.indexer

    def column(field: str) -> Column:
        values = [getattr(by_name[s], field) if s in by_name else 0 for s in SLOTS]
        return np.asarray(values, dtype=np.float64)

    return ModelNumbers(
        layers=float(model.layers),
        hidden=float(model.hidden),
        heads=float(model.heads),
        kv_width=float(kv),
        query_width=float(model.query_width),
        value_width=float(model.value_width),
        sequence=float(sequence),
        keys=model.keys(sequence),
        chosen=float(indexer.topk) if indexer and sequence > indexer.topk else 0.0,
        vocabulary=float(model.vocabulary),
        tied=float(model.tied),
        gate=3.0 if model.gated else 2.0,
        experts=float(model.moe.count) if model.moe else 1.0,
        active=float(model.moe.active) if model.moe else 1.0,
        groups=float(model.moe.groups) if model.moe and model.moe.groups else float("inf"),
        moe_layers=float(model.layers - model.dense_layers),
        layer_parameters=model.parameters() - experts - embedding,
        expert_parameters=experts,
        embedding_parameters=embedding,
        training_flops=model.training_flops(1, sequence),
        inputs=column("inputs"),
        outputs=column("outputs"),
        counts=column("layers"),
    )


def machine(cluster: Cluster) -> MachineNumbers:
    """Returns the cluster as floats."""
    chip = cluster.device
    rates = ("peak16", "best16", "best8", "peak8", "peak4", "best32", "memory_bytes", "memory_rate")
    figures = ("intra", "inter", "intra_latency", "inter_latency", "host_memory")
    return MachineNumbers(
        **{name: getattr(chip, name) for name in rates},
        **{name: getattr(cluster, name) for name in figures},
        peak32=chip.own_peak32,
        per_node=float(cluster.per_node),
        units=float(chip.units),
        devices=float(cluster.devices),
        gloo=float(chip.gloo),
    )


def tokens(model: ModelNumbers, layouts: Layouts) -> Column:
    """Returns the tokens of one micro-batch on one rank."""
    return np.asarray(layouts.micro_batch * model.sequence / layouts.cp)


def element(layouts: Layouts) -> Column:
    """Returns the bytes of an element of activations or weights in memory and communication."""
    return np.where(layouts.precision == FP32, 4.0, 2.0)


@dataclass(frozen=True)
class StageLayers:
    """Numbers of layers of the first, the fullest and the last rank, over all their chunks."""

    first: Column
    most: Column
    last: Column


def stage_layers(layers: Number, stages: Number, virtual: Number) -> StageLayers:
    """Returns an even distribution of layers; if impossible, embedding and head count as layers.

    For example, with 126 layers on 128 stages the first and the last have one layer fewer
    (Llama 3, arXiv 2407.21783, section 3.3.2). If that is impossible too, the last stage gets
    the remaining layers. Without stages, all three are the number of layers.
    """
    virtual = np.where(np.asarray(stages) > 1, virtual, 1)
    chunks = stages * virtual
    most = np.ceil(layers / chunks) * virtual
    ends = (np.mod(layers, chunks) > 0) & (np.mod(layers + 2, chunks) == 0)
    remaining_layers = np.maximum(layers - most * (stages - 1), 0)
    return StageLayers(
        np.where(ends, most - 1, most), most, np.where(ends, most - 1, remaining_layers)
    )


# The constants of the cost model, with a prior for each: a middle, and a plausible deviation as a
# factor's logarithm. All are positive. The fit (``calibrate``) starts at the middle and moves as
# far as measurements outweigh the prior. Errors of fitted constants compensate each other: together
# they predict, but a single one isn't a physical quantity.

OWN_STACK = "own runs"  # name in ``Calibration.stacks`` for software of the user's runs
FILE = Path(__file__).with_name("calibration.json")


def prior(middle: float, spread: float) -> Any:
    """Returns a field with the initial value ``middle``, and the ``spread`` of its logarithm."""
    return field(default=middle, metadata={"spread": spread})


@dataclass(frozen=True)
class Constants:
    """Factors from FLOPs and bytes to seconds; rates are shares of the devices' peaks."""

    gemm16: float = prior(0.9, 0.1)  # share of the rate of the best 16-bit product
    gemm16_new: float = prior(0.9, 0.1)  # the same on devices with an 8-bit unit
    gemm16_newest: float = prior(0.9, 0.1)  # and on devices with a 4-bit unit
    gemm8: float = prior(0.75, 0.2)  # share of the best 8-bit product, one scale per tensor
    small: float = prior(1.0, 0.5)  # share of the operands' transfer time that isn't hidden
    attention: float = prior(0.6, 0.2)  # flash attention: share of the 16-bit peak
    attention_new: float = prior(0.45, 0.2)
    attention_newest: float = prior(0.45, 0.2)
    attention_unfused: float = prior(0.5, 0.4)  # products of scores that are written out
    unfused_bytes: float = prior(10.0, 0.4)  # per score, forward: softmax, mask, dropout
    misaligned: float = prior(8.0, 0.5)  # slowdown if head width isn't a multiple of 8
    elementwise: float = prior(1.0, 0.4)  # bytes / counted bytes: norms, activations, residuals
    cast: float = prior(1.0, 0.5)  # the same for casts to 8 bits or fewer
    selective: float = prior(0.15, 0.5)  # share of the forward that selective recompute repeats
    layer_seconds: float = prior(5e-5, 0.7)  # fixed time per layer and micro-batch
    expert_seconds: float = prior(1e-3, 0.3)  # the same for routing and sorting tokens
    permute: float = prior(1.5, 0.3)  # passes over the dispatched tokens' bytes
    loss_bytes: float = prior(24.0, 0.5)  # per logit, forward and backward
    stage_seconds: float = prior(2e-3, 1.0)  # fixed time per micro-batch of a pipeline
    step_seconds: float = prior(0.01, 1.0)  # fixed time per step
    optimizer_bytes: float = prior(34.0, 0.3)  # per parameter of the rank's shard
    intra: float = prior(0.7, 0.25)  # share of the rate of the link within a node
    inter: float = prior(0.7, 0.3)  # share of the rate of the link between nodes
    latency: float = prior(2.0, 0.5)  # factor of a hop's latency
    waves: float = prior(0.9, 0.3)  # factor of the idle time in the last round of tiles
    rows: float = prior(1.0, 0.5)  # weight of the operands' bytes in products of few tokens
    tp_exposed: float = prior(0.75, 0.3)  # share of tensor parallelism's time not hidden
    tp_waits: float = prior(1.6, 0.4)  # factor of a blocking all-reduce, for the slowest rank
    cp_exposed: float = prior(0.4, 0.6)
    pp_exposed: float = prior(0.5, 0.7)
    ep_exposed: float = prior(0.5, 0.4)
    dp_window: float = prior(0.7, 0.3)  # share of the backward pass that reduction hides behind
    dp_contention: float = prior(0.126, 0.5)  # compute time lost / hidden communication time
    bubble: float = prior(1.0, 0.05)  # factor of the schedule's closed form
    imbalance: float = prior(0.05, 0.7)  # share of expert work lost to the fullest rank


@dataclass(frozen=True)
class MemoryConstants:
    """Factors from counts to resident bytes of a device."""

    context: float = prior(5.0, 0.3)  # 10^9 bytes: context, libraries, communicators
    state: float = prior(1.0, 0.1)  # weights, gradients, moments / their count
    activations: float = prior(1.0, 0.15)  # stored activations / their count
    working: float = prior(2.5, 0.3)  # working memory of a layer / bytes of its tensors
    logits: float = prior(10.5, 0.3)  # bytes per logit, mostly fp32


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, one factor per software stack, and the spread of held-out errors.

    The field ``spread`` has the 10 % and 90 % quantiles of the logarithm of measured over
    predicted, by the kind of prediction. For memory the unit is its uncertainty
    (``Memory.doubt``). The field ``provenance`` describes the data, the date and the method
    of the fit.
    """

    constants: Constants = Constants()
    memory: MemoryConstants = MemoryConstants()
    stacks: Mapping[str, float] = field(default_factory=dict)  # factors of seconds
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def stack(self, name: str | None) -> float:
        """Returns the factor of a stack's seconds; 1 for an unknown one."""
        return self.stacks.get(name or "", 1.0)

    def quantiles(self, kind: str) -> tuple[float, float]:
        """Returns the 10 % and 90 % quantiles of the error's logarithm for a kind of prediction."""
        return self.spread.get(kind, UNCALIBRATED[kind])

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "hasten calibration",
            "constants": vars(self.constants),
            "memory": vars(self.memory),
            "stacks": dict(self.stacks),
            "spread": {name: list(pair) for name, pair in self.spread.items()},
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, stored: Any) -> Calibration:
        """Reads the result of ``to_dict``, also from JSON."""
        return cls(
            Constants(**stored["constants"]),
            MemoryConstants(**stored["memory"]),
            stored["stacks"],
            {kind: (low, high) for kind, (low, high) in stored["spread"].items()},
            stored["provenance"],
        )


# Intervals before any fit: about half to twice the time, and one ``doubt`` of the memory.
UNCALIBRATED: Mapping[str, tuple[float, float]] = {
    "dense": (-0.4, 0.4),
    "dense_new_stack": (-0.7, 0.7),
    "moe": (-0.7, 0.7),
    "moe_new_stack": (-0.9, 0.9),
    "memory": (-0.8, 1.0),
}


@functools.cache
def calibrated() -> Calibration:
    """Returns the calibration in this package."""
    return Calibration.from_dict(json.loads(FILE.read_text(encoding="utf-8")))
