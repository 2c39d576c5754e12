"""Predicted cost of layouts: seconds of a step, tokens per second, memory, intervals.

  1. A micro-batch through all layers: products, attention, the rest (``seconds``).
  2. Communication between ranks, and the part of it that isn't hidden (``seconds``).
  3. The slowest stage sets the pace of a pipeline; its closed form gives the bubble.
  4. Once per step: the optimizer on its shard, the fixed part.
  5. The software's factor, and the interval of held-out errors of such predictions.

All of it is arithmetic on columns: one layout or a hundred thousand need the same few
calls. A ``PlanCandidate`` has the figures of one layout.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.models.architecture import Architecture
from hasten.models.host_memory import HostBytes
from hasten.planner.cluster import Cluster
from hasten.planner.layout import FP8, FP32, Column, Layouts, PlannedJob, PlannedLayout
from hasten.planner.memory import (
    LORA_SHARE,
    MemoryColumns,
    first_rank,
    host_memory,
    memory,
    rank_parameters,
)
from hasten.planner.numbers import (
    OWN_STACK,
    Calibration,
    Constants,
    MachineNumbers,
    ModelNumbers,
    Number,
    calibrated,
    machine,
    numbers,
)
from hasten.planner.seconds import (
    PlannedCommunication,
    again,
    bubble_stages,
    communication,
    forward,
    passes,
    stage_seconds,
)


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of a step by cause; they add up to ``total``."""

    compute: Column  # products, elementwise work and fixed costs of the layers
    attention: Column
    head: Column
    recompute: Column
    tp: Column  # exposed, with context parallelism's
    dp: Column  # exposed, with encoding
    pp: Column  # bubble, uneven stages and exposed sends
    ep: Column
    optimizer: Column
    other: Column

    @property
    def total(self) -> Column:
        layers = self.compute + self.attention + self.head + self.recompute
        return np.asarray(
            layers + self.tp + self.dp + self.pp + self.ep + self.optimizer + self.other
        )


@dataclass(frozen=True)
class Prediction:
    """Columns, one entry per layout; ``p10`` and ``p90`` are (low, high) of 80 % of such cases."""

    step: PredictedStep
    step_seconds: Column
    step_p10: Column
    step_p90: Column
    tokens_per_second_per_device: Column
    tokens_p10: Column
    tokens_p90: Column
    mfu: Column
    memory: MemoryColumns
    memory_bytes: Column
    memory_p10: Column
    memory_p90: Column
    host: HostBytes  # ranks of one node
    fits: NDArray[
        np.bool_
    ]  # P90 of the memory is at most the device's, the host's at most a node's


def predict(
    architecture: Architecture,
    cluster: Cluster,
    job: PlannedJob,
    layouts: Layouts,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> Prediction:
    """Predicts every layout's step on a cluster.

    ``stack`` is the name of a software in ``Calibration.stacks``. Without it or own runs, the
    interval is that of unknown software.
    """
    fitted = calibration or calibrated()
    stack = stack or (OWN_STACK if OWN_STACK in fitted.stacks else None)
    model, machine_numbers = numbers(architecture, job.sequence), machine(cluster)
    lora = job.task == "lora"
    seconds = steps(
        model, machine_numbers, layouts, float(job.global_batch), fitted.constants, lora
    )
    factor = fitted.stack(stack)
    step = PredictedStep(**{name: part * factor for name, part in vars(seconds).items()})
    kind = "moe" if architecture.moe else "dense"
    kind += "" if stack in fitted.stacks else "_new_stack"
    total = step.total
    low, high = (total * np.exp(q) for q in fitted.quantiles(kind))
    count = _micro_batches(layouts, job.global_batch)
    parts = memory(model, layouts, count, fitted.memory, lora)
    used = parts.total
    least, most = (used * np.exp(q * parts.doubt) for q in fitted.quantiles("memory"))
    host = host_memory(model, layouts, machine_numbers, parts, lora)
    rate = job.global_batch * model.sequence / layouts.devices
    learned = 2 / 3 if lora else 1.0
    return Prediction(
        step=step,
        step_seconds=total,
        step_p10=low,
        step_p90=high,
        tokens_per_second_per_device=rate / total,
        tokens_p10=rate / high,
        tokens_p90=rate / low,
        mfu=learned * rate / total * model.training_flops / _peak(machine_numbers, layouts),
        memory=parts,
        memory_bytes=used,
        memory_p10=least,
        memory_p90=most,
        host=host,
        fits=(most <= machine_numbers.memory_bytes) & (host.most <= machine_numbers.host_memory),
    )


def steps(
    model: ModelNumbers,
    machine_numbers: MachineNumbers,
    layouts: Layouts,
    global_batch: Number,
    c: Constants,
    lora: Number = False,
) -> PredictedStep:
    """Returns the seconds of a step before the software's factor."""
    M = _micro_batches(layouts, global_batch)
    part = forward(model, machine_numbers, layouts, c, lora)
    sent = communication(model, machine_numbers, layouts, c, lora)
    back, back_attention = passes(lora)
    core = part.products + part.experts
    work = core * (1 + back) + part.elementwise * 3 + part.fixed
    attention = part.attention * (1 + back_attention)
    repeated = again(part, layouts, c)
    # An all-reduce blocks; gathers and scatters of sequence parallelism can overlap with products
    # in parts.
    waits = np.where(layouts.sequence_parallel > 0, c.tp_exposed, c.tp_waits)
    tensor = waits * sent.tp + c.cp_exposed * sent.cp
    experts = c.ep_exposed * sent.ep
    layers = work + attention + repeated + tensor + experts
    slow, mean = stage_seconds(model.layers, layouts, layers, part.head)
    sends = (c.pp_exposed * sent.pp + c.stage_seconds) * layouts.virtual
    bubble = c.bubble * bubble_stages(layouts) * (mean + sends)
    backward = core * back + attention * back_attention / (1 + back_attention)
    exposed = _exposed(sent, backward / layouts.pp, work / layouts.pp, M, c)
    share = M / layouts.pp
    return PredictedStep(
        compute=work * share,
        attention=attention * share,
        head=part.head * share,
        recompute=repeated * share,
        tp=tensor * share,
        dp=exposed + sent.encode * np.where(sent.dp_each > 0, M, 1.0),
        pp=M * (slow - mean) + np.where(layouts.pp > 1, M * sends, 0.0) + bubble,
        ep=experts * share,
        optimizer=_owned(model, layouts, lora) * c.optimizer_bytes / machine_numbers.memory_rate,
        other=c.step_seconds + 0 * M,
    )


def _owned(model: ModelNumbers, layouts: Layouts, lora: Number) -> Column:
    """Returns the number of parameters that one rank's optimizer updates."""
    body, rare = rank_parameters(model, layouts, *first_rank(model, layouts))
    sharded = layouts.zero >= 1
    ranks = layouts.dp * layouts.cp
    spread = np.maximum(ranks * layouts.tp / layouts.ep, 1)
    owned = body / np.where(sharded, ranks, 1)
    owned = owned + rare / np.where(sharded, spread, 1)
    return np.asarray(owned * np.where(lora, LORA_SHARE, 1.0))


def _micro_batches(layouts: Layouts, global_batch: Number) -> Column:
    return np.asarray(np.maximum(1.0, np.ceil(global_batch / (layouts.dp * layouts.micro_batch))))


def _exposed(
    sent: PlannedCommunication, backward: Column, work: Column, M: Column, c: Constants
) -> Column:
    """Returns the seconds of exposed data-parallel communication, and of slowed compute.

    Communication once a step is hidden by the last micro-batch's backward pass. Communication per
    micro-batch is hidden by both passes. The last bucket is never hidden.
    """
    each = sent.dp_each > 0
    window = c.dp_window * np.where(each, backward + work / 3, backward)
    hidden = np.minimum(sent.dp * (1 - sent.dp_last), window)
    one = sent.dp - hidden + c.dp_contention * hidden
    return one * np.where(each, M, 1.0)


def _peak(machine_numbers: MachineNumbers, layouts: Layouts) -> Column:
    """Returns the reference of MFU in FLOP/s, in the format of the layers' products."""
    p = layouts.precision
    eight = (p == FP8) & (np.asarray(machine_numbers.peak8) > 0)
    peak = np.where(eight, machine_numbers.peak8, machine_numbers.peak16 * np.ones(len(layouts)))
    return np.asarray(np.where(p == FP32, machine_numbers.peak32, peak))


STEP_PARTS = tuple(f.name for f in fields(PredictedStep))


@dataclass(frozen=True)
class Span:
    """A figure and the interval that contains 80 % of such cases."""

    middle: float
    low: float
    high: float

    def times(self, factor: float) -> Span:
        return Span(self.middle * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class PlanCandidate:
    """A layout on a cluster; ``simulated`` if its pipeline schedule was simulated."""

    layout: PlannedLayout
    cluster: Cluster
    micro_batches: int
    step_parts: dict[str, float]  # seconds; they add up to step_seconds.middle
    step_seconds: Span
    tokens_per_second_per_device: Span
    mfu: float
    memory_parts: dict[str, float]  # bytes; they add up to memory_bytes.middle
    memory_bytes: Span
    host_bytes: dict[str, float]  # ranks of one node, by phase
    fits: bool
    simulated: bool = False
    stage_layers: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def mfu_span(self) -> Span:
        """MFU with the interval of the step's time."""
        step = self.step_seconds
        return Span(self.mfu, *(self.mfu * step.middle / s for s in (step.high, step.low)))

    @property
    def exposed(self) -> float:
        """Seconds of a step in which a rank only waits for communication."""
        return sum(self.step_parts[part] for part in ("tp", "dp", "ep"))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {
            "layout": asdict(self.layout),
            "device": self.cluster.device.name,
            "nodes": self.cluster.nodes,
            "devices": self.devices,
            "micro_batches": self.micro_batches,
            "step_seconds": asdict(self.step_seconds),
            "step_parts": self.step_parts,
            "exposed_comm_seconds": self.exposed,
            "tokens_per_second_per_device": asdict(self.tokens_per_second_per_device),
            "mfu": self.mfu,
            "mfu_interval": [self.mfu_span.low, self.mfu_span.high],
            "memory_bytes": asdict(self.memory_bytes),
            "memory_parts": self.memory_parts,
            "host_bytes": self.host_bytes,
            "fits": self.fits,
            "simulated": self.simulated,
            "stage_layers": list(self.stage_layers),
        }


def candidate(
    prediction: Prediction, layouts: Layouts, row: int, cluster: Cluster, job: PlannedJob
) -> PlanCandidate:
    """Returns row ``row`` of a prediction."""
    layout = layouts.at(row)

    def span(middle: Any, low: Any, high: Any) -> Span:
        return Span(float(middle[row]), float(low[row]), float(high[row]))

    rate = prediction.tokens_per_second_per_device
    return PlanCandidate(
        layout=layout,
        cluster=cluster,
        micro_batches=max(1, -(-job.global_batch // (layout.dp * layout.micro_batch))),
        step_parts={name: float(getattr(prediction.step, name)[row]) for name in STEP_PARTS},
        step_seconds=span(prediction.step_seconds, prediction.step_p10, prediction.step_p90),
        tokens_per_second_per_device=span(rate, prediction.tokens_p10, prediction.tokens_p90),
        mfu=float(prediction.mfu[row]),
        memory_parts={n: float(np.atleast_1d(v)[row]) for n, v in vars(prediction.memory).items()},
        memory_bytes=span(prediction.memory_bytes, prediction.memory_p10, prediction.memory_p90),
        host_bytes={n: float(v[row]) for n, v in vars(prediction.host).items()},
        fits=bool(prediction.fits[row]),
    )
