"""Predicted cost of layouts: seconds of a step, tokens per second, memory, intervals.

  1. A micro-batch through all layers: products, attention, the rest (``seconds``).
  2. Communication between ranks, and the part of it that isn't hidden (``seconds``).
  3. The slowest stage sets the pace of a pipeline; its closed form gives the bubble.
  4. Once per step: the optimizer on its shard, the fixed part.
  5. The software's factor, and the interval of held-out errors of such predictions.

The layouts are valid ones; ``advice.impossibilities`` returns what speaks against one.

All of it is arithmetic on columns: one layout or a hundred thousand need the same few
calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import DUALPIPE, FP8, FP32, MXFP8, NVFP4, Column, Layouts, PlannedJob
from hasten.planner.memory import LORA_SHARE, MemoryColumns, first_rank, memory, rank_parameters
from hasten.planner.numbers import (
    Calibration,
    Constants,
    MachineNumbers,
    ModelNumbers,
    Value,
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

# DualPipe sends tokens to experts while others compute, and gives 20 of an H800's 132
# multiprocessors to sending (arXiv 2412.19437, section 3.2).
SENDING = 20 / 132


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
    fits: NDArray[np.bool_]  # the P90 of its memory lies within the device's


def predict(
    architecture: Architecture,
    cluster: Cluster,
    job: PlannedJob,
    layouts: Layouts,
    calibration: Calibration | None = None,
    stack: str | None = None,
) -> Prediction:
    """Every layout's step on that cluster.

    ``stack`` names the software where measurements of it were fitted (``Calibration.stacks``);
    without, the interval is that of software never seen before.
    """
    fitted = calibration or calibrated()
    model, machine_numbers = numbers(architecture, job.sequence), machine(cluster)
    lora = job.task == "lora"
    seconds = steps(
        model, machine_numbers, layouts, float(job.global_batch), fitted.constants, lora
    )
    factor = fitted.stack(stack)
    step = PredictedStep(**{name: value * factor for name, value in vars(seconds).items()})
    kind = "moe" if architecture.moe else "dense"
    kind += "" if stack in fitted.stacks else "_new_stack"
    total = step.total
    low, high = (total * np.exp(q) for q in fitted.quantiles(kind))
    count = _micro_batches(layouts, job.global_batch)
    parts = memory(model, layouts, count, fitted.memory, lora)
    used = parts.total
    least, most = (used * np.exp(q * parts.doubt) for q in fitted.quantiles("memory"))
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
        fits=most <= machine_numbers.memory_bytes,
    )


def steps(
    model: ModelNumbers,
    machine_numbers: MachineNumbers,
    layouts: Layouts,
    global_batch: Value,
    c: Constants,
    lora: Value = False,
) -> PredictedStep:
    """Seconds of a step before the software's factor."""
    M = _micro_batches(layouts, global_batch)
    part = forward(model, machine_numbers, layouts, c, lora)
    sent = communication(model, machine_numbers, layouts, c, lora)
    back, back_attention = passes(lora)
    core = part.products + part.experts
    work = core * (1 + back) + part.elementwise * 3 + part.fixed
    attention = part.attention * (1 + back_attention)
    repeated = again(part, layouts, c)
    # An all-reduce stops everything; the gathers and scatters of sequence parallelism can be cut
    # into pieces that travel while others are multiplied.
    waits = np.where(layouts.sequence_parallel > 0, c.tp_exposed, c.tp_waits)
    tensor = waits * sent.tp + c.cp_exposed * sent.cp
    # Expert parallelism's exchanges that nothing hides; where all hide, what hiding them costs.
    exchanges, busy = c.ep_exposed * sent.ep, work + attention + repeated
    hidden = np.maximum(exchanges - busy, 0) + busy * SENDING / (1 - SENDING)
    overlaps = (layouts.schedule == DUALPIPE) & (layouts.pp > 1) & (sent.ep > 0)
    experts = np.where(overlaps, hidden, exchanges)
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


def _owned(model: ModelNumbers, layouts: Layouts, lora: Value) -> Column:
    """Parameters that one rank's optimizer updates."""
    body, rare = rank_parameters(model, layouts, *first_rank(model, layouts))
    sharded = layouts.zero >= 1
    copies = np.where((layouts.schedule == DUALPIPE) & (layouts.pp > 1), 2.0, 1.0)
    ranks = layouts.dp * layouts.cp
    spread = np.maximum(ranks * layouts.tp / layouts.ep, 1)
    owned = body / np.where(sharded, ranks * copies, 1)
    owned = owned + rare / np.where(sharded, spread * copies, 1)
    return np.asarray(owned * np.where(lora, LORA_SHARE, 1.0))


def _micro_batches(layouts: Layouts, global_batch: Value) -> Column:
    return np.asarray(np.maximum(1.0, np.ceil(global_batch / (layouts.dp * layouts.micro_batch))))


def _exposed(
    sent: PlannedCommunication, backward: Column, work: Column, M: Column, c: Constants
) -> Column:
    """Data parallelism's share that nothing hides, and what the hidden share costs the compute.

    Once a step it hides behind the last micro-batch's backward pass; per micro-batch, behind both
    passes. Its last bucket starts when there is nothing left to hide behind.
    """
    each = sent.dp_each > 0
    window = c.dp_window * np.where(each, backward + work / 3, backward)
    hidden = np.minimum(sent.dp * (1 - sent.dp_last), window)
    one = sent.dp - hidden + c.dp_contention * hidden
    return one * np.where(each, M, 1.0)


def _peak(machine_numbers: MachineNumbers, layouts: Layouts) -> Column:
    """FLOP/s that MFU is taken of, in the format of the layers' products."""
    p = layouts.precision
    eight = (p == FP8) | (p == MXFP8)
    eight &= np.asarray(machine_numbers.peak8) > 0
    four = (p == NVFP4) & (np.asarray(machine_numbers.peak4) > 0)
    peak = np.where(eight, machine_numbers.peak8, machine_numbers.peak16 * np.ones(len(layouts)))
    peak = np.where(four, machine_numbers.peak4, peak)
    return np.asarray(np.where(p == FP32, machine_numbers.peak32, peak))
