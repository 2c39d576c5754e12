"""Models and clusters as plain numbers, so that one formula serves one case or thousands of rows.

Every field is a float, or an array with one entry per row: ``numbers`` makes the first from an
architecture, ``stacked`` the second from many. The matrices become columns in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Column

Value = Any  # a float or a Column: both behave alike in every formula here
SLOTS = (
    *("qkv", "q_down", "q", "kv_down", "kv_up", "attention_out", "up", "down"),
    *("router", "expert_up", "expert_down", "shared_up", "shared_down", "head"),
)
# How a slot is cut is the same in every model; see ``architecture.Cut``.
COLUMNS = frozenset({"qkv", "q", "kv_up", "up", "shared_up", "head"})
ROWS = frozenset({"attention_out", "down", "shared_down"})
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
    inputs: Value  # (slots,) or (slots, rows)
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
    return MachineNumbers(
        peak16=chip.peak16,
        best16=chip.best16,
        best8=chip.best8,
        peak8=chip.peak8,
        peak4=chip.peak4,
        peak32=chip.peak("fp32"),
        best32=chip.best32,
        memory_bytes=chip.memory_bytes,
        memory_rate=chip.memory_rate,
        per_node=float(cluster.per_node),
        units=float(chip.units),
        devices=float(cluster.devices),
        intra=cluster.intra,
        inter=cluster.inter,
        intra_latency=cluster.intra_latency,
        inter_latency=cluster.inter_latency,
        gloo=float(chip.gloo),
    )


N = TypeVar("N", ModelNumbers, MachineNumbers)


def stacked(cases: Sequence[N]) -> N:
    """Many cases as one, an array in each field; a matrix's figures become (slots, rows)."""
    columns = {
        f.name: np.stack([np.asarray(getattr(case, f.name)) for case in cases], axis=-1)
        for f in fields(cases[0])
    }
    return type(cases[0])(**columns)
