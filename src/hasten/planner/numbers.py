"""Models, clusters and the cost model's constants as plain numbers.

One formula serves one case or thousands of rows. Every field of a model or machine is a
float, or an array with one entry per row. The function ``numbers`` makes the floats
from an architecture. The matrices become columns in a fixed order.
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

Value = Any  # a float or a Column: both behave alike in every formula here
SLOTS = (
    *("qkv", "q_down", "q", "kv_down", "kv_up", "attention_out", "up", "down"),
    *("compress_1", "compress_2", "group_out"),
    *("router", "expert_up", "expert_down", "shared_up", "shared_down", "head"),
)
# How a slot is cut is the same in every model; see ``architecture.Cut``.
COLUMNS = frozenset({"qkv", "q", "kv_up", "up", "shared_up", "head"})
ROWS = frozenset({"attention_out", "group_out", "down", "shared_down"})
EXPERTS = frozenset({"expert_up", "expert_down"})


@dataclass(frozen=True)
class ModelNumbers:
    """An architecture at a sequence length; matrices as (inputs, outputs, layers) per slot."""

    layers: Value
    hidden: Value
    heads: Value
    kv_width: Value  # of keys and values of a token, over all heads
    query_width: Value
    value_width: Value
    sequence: Value
    keys: Value  # that a query sees on average
    vocabulary: Value
    tied: Value
    gate: Value  # 3 passes over the MLP's width where it is gated, 2 where not
    experts: Value
    active: Value
    groups: Value  # nodes that a token may go to; infinite where routing doesn't limit them
    moe_layers: Value
    layer_parameters: Value  # of all layers, without routed experts
    expert_parameters: Value
    embedding_parameters: Value  # of input and output, tied ones once
    training_flops: Value  # per token
    inputs: Value  # (positions,) or (positions, rows)
    outputs: Value
    counts: Value  # layers that have it


@dataclass(frozen=True)
class MachineNumbers:
    """A cluster's figures."""

    peak16: Value
    best16: Value
    best8: Value
    peak8: Value
    peak4: Value
    peak32: Value
    best32: Value
    memory_bytes: Value
    memory_rate: Value
    per_node: Value
    units: Value
    devices: Value
    intra: Value
    inter: Value
    intra_latency: Value
    inter_latency: Value
    gloo: Value  # 1: an all-reduce stands for a reduce-scatter, and gathers hide behind nothing


def numbers(model: Architecture, sequence: int) -> ModelNumbers:
    """The model at that sequence length as floats."""
    by_name = {matrix.name: matrix for matrix in model.matrices()}
    experts = float(model.expert_parameters())
    embedding = float(model.vocabulary * model.hidden * (1 if model.tied else 2))
    kv = model.kv_heads * (model.query_width + model.value_width)

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
    """The cluster as floats."""
    chip = cluster.device
    rates = ("peak16", "best16", "best8", "peak8", "peak4", "best32", "memory_bytes", "memory_rate")
    links = ("intra", "inter", "intra_latency", "inter_latency")
    return MachineNumbers(
        **{name: getattr(chip, name) for name in rates},
        **{name: getattr(cluster, name) for name in links},
        peak32=chip.own_peak32,
        per_node=float(cluster.per_node),
        units=float(chip.units),
        devices=float(cluster.devices),
        gloo=float(chip.gloo),
    )


# What follows from a model and a layout by counting.


def tokens(model: ModelNumbers, layouts: Layouts) -> Column:
    """Tokens of one micro-batch on one rank."""
    return np.asarray(layouts.micro_batch * model.sequence / layouts.cp)


def element(layouts: Layouts) -> Column:
    """Bytes of an activation or a weight as software reads, writes and sends it."""
    return np.where(layouts.precision == FP32, 4.0, 2.0)


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
    remaining_layers = np.maximum(layers - most * (stages - 1), 0)
    return StageLayers(
        np.where(ends, most - 1, most), most, np.where(ends, most - 1, remaining_layers)
    )


# The constants of the cost model, what each means, and what was believed before any measurement.
#
# Each is positive and has a prior: a middle and how far, as a factor's logarithm, it may plausibly
# lie from it. The fit (``calibrate``) starts at the middle and moves as far as measurements
# outweigh the prior. Fitted constants compensate each other: they predict, and aren't physics to be
# quoted.

OWN_STACK = "own runs"  # the name of the software in ``Calibration.stacks`` after own runs
FILE = Path(__file__).with_name("calibration.json")


def prior(middle: float, spread: float) -> Any:
    """A field that starts at ``middle``; ``spread``: of its logarithm."""
    return field(default=middle, metadata={"spread": spread})


@dataclass(frozen=True)
class Constants:
    """Factors from FLOPs and bytes to seconds; rates are shares of the devices' peaks."""

    gemm16: float = prior(0.9, 0.1)  # of the best 16-bit product
    gemm16_new: float = prior(0.9, 0.1)  # the same on devices that have an 8-bit unit
    gemm16_newest: float = prior(0.9, 0.1)  # and on those with a 4-bit unit
    gemm8: float = prior(0.75, 0.2)  # of the best 8-bit product, one scale per tensor
    small: float = prior(1.0, 0.5)  # operands' bytes in a product's time; 1: not hidden at all
    attention: float = prior(0.6, 0.2)  # flash attention, of the 16-bit peak
    attention_new: float = prior(0.45, 0.2)
    attention_newest: float = prior(0.45, 0.2)
    attention_unfused: float = prior(0.5, 0.4)  # products of scores that are written out
    unfused_bytes: float = prior(10.0, 0.4)  # per score, forward: softmax, mask, dropout
    misaligned: float = prior(8.0, 0.5)  # times slower: head width no multiple of 8
    elementwise: float = prior(1.0, 0.4)  # norms, activations, residuals: bytes against the count
    cast: float = prior(1.0, 0.5)  # the same for casts to 8 bits and fewer
    selective: float = prior(0.15, 0.5)  # share of the forward that selective recompute repeats
    layer_seconds: float = prior(5e-5, 0.7)  # per layer and micro-batch, beside all of this
    expert_seconds: float = prior(1e-3, 0.3)  # the same for routing and sorting tokens
    permute: float = prior(1.5, 0.3)  # passes over the dispatched tokens' bytes
    loss_bytes: float = prior(24.0, 0.5)  # per logit, forward and backward
    stage_seconds: float = prior(2e-3, 1.0)  # per micro-batch of a pipeline: handing over
    step_seconds: float = prior(0.01, 1.0)  # per step, beside all of this
    optimizer_bytes: float = prior(34.0, 0.3)  # per parameter of the rank's shard
    intra: float = prior(0.7, 0.25)  # of the link within a node
    inter: float = prior(0.7, 0.3)  # of the link between nodes
    latency: float = prior(2.0, 0.5)  # of a hop
    waves: float = prior(0.9, 0.3)  # of a product's last, partly filled round of tiles
    rows: float = prior(1.0, 0.5)  # more of the same, for products of few tokens
    tp_exposed: float = prior(0.75, 0.3)  # share of tensor parallelism's time not hidden
    tp_waits: float = prior(1.6, 0.4)  # of a blocking all-reduce: ranks wait for the last
    cp_exposed: float = prior(0.4, 0.6)
    pp_exposed: float = prior(0.5, 0.7)
    ep_exposed: float = prior(0.5, 0.4)
    dp_window: float = prior(0.7, 0.3)  # share of the backward pass that reduction hides behind
    dp_contention: float = prior(0.126, 0.5)  # of hidden communication, felt by the compute
    bubble: float = prior(1.0, 0.05)  # of the schedule's closed form
    imbalance: float = prior(0.05, 0.7)  # share of expert work lost to the fullest rank


@dataclass(frozen=True)
class MemoryConstants:
    """Factors from counts to resident bytes of a device."""

    context: float = prior(5.0, 0.3)  # 10^9 bytes: context, libraries, communicators
    state: float = prior(1.0, 0.1)  # weights, gradients, moments against their count
    activations: float = prior(1.0, 0.15)  # kept activations against their count
    working: float = prior(2.5, 0.3)  # of the layer at work, against all that it makes
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
    stacks: Mapping[str, float] = field(default_factory=dict)  # seconds, times
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def stack(self, name: str | None) -> float:
        """The factor of that stack's seconds; 1, the shrunken mean, for an unknown one."""
        return self.stacks.get(name or "", 1.0)

    def quantiles(self, kind: str) -> tuple[float, float]:
        """Logarithms by which a prediction of that kind spans 10 % to 90 %."""
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
        """The inverse of ``to_dict``, also through JSON."""
        return cls(
            Constants(**stored["constants"]),
            MemoryConstants(**stored["memory"]),
            stored["stacks"],
            {kind: (low, high) for kind, (low, high) in stored["spread"].items()},
            stored["provenance"],
        )


# Before any fit: half to twice the figure for time, about a doubt for memory.
UNCALIBRATED: Mapping[str, tuple[float, float]] = {
    "dense": (-0.4, 0.4),
    "dense_new_stack": (-0.7, 0.7),
    "moe": (-0.7, 0.7),
    "moe_new_stack": (-0.9, 0.9),
    "memory": (-0.8, 1.0),
}


@functools.cache
def calibrated() -> Calibration:
    """The calibration that the package brings along."""
    return Calibration.from_dict(json.loads(FILE.read_text(encoding="utf-8")))
