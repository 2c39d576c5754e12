"""The pipeline of one candidate played through, and its timetable as a drawing.

A prediction of many layouts at once takes the schedule's closed form. For the few that matter the
order itself is simulated, with layers dealt to uneven stages so that the slowest is as quick as can
be; the last stage has the head and the loss, which weigh as much as several layers where the
vocabulary is long. What was predicted of the rest of the step stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hasten.models.architecture import Architecture
from hasten.parts.distributed.pipeline.timetable import drawing
from hasten.planner.candidate import PlanCandidate, Span
from hasten.planner.compute import stage_layers
from hasten.planner.layout import PlannedLayout
from hasten.planner.schedules import (
    StageSeconds,
    idle_seconds,
    orders,
    simulate,
    why_impossible,
)

PLAYED = 2, 3  # of many micro-batches so many times twice the stages are played
PIPELINE = ("compute", "attention", "head", "recompute", "tp", "pp", "ep")


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Seconds of one micro-batch: through all layers, the head, and handing over on one rank."""

    forward: float
    inputs: float
    weights: float
    head: float
    sends: float

    @property
    def layers(self) -> float:
        return self.forward + self.inputs + self.weights


def resimulated(model: Architecture, found: PlanCandidate, lora: bool = False) -> PlanCandidate:
    """The candidate with its pipeline simulated; as it is where it has none, or ends as stages."""
    layout, count = found.layout, found.micro_batches
    if layout.pp == 1 or layout.pp * layout.virtual > model.layers:
        return found
    if why_impossible(layout.schedule, layout.pp, count, layout.virtual):
        return found
    one = micro_batch(model, found, lora)
    layers, seconds = stages(model, layout, one)
    pipeline = pipeline_seconds(layout, count, seconds)
    before = sum(found.step_parts[part] for part in PIPELINE)
    parts = found.step_parts | {"pp": found.step_parts["pp"] + pipeline - before}
    ratio = sum(parts.values()) / found.step_seconds.middle
    rate = found.tokens_per_second_per_device
    return replace(
        found,
        step_parts=parts,
        step_seconds=found.step_seconds.times(ratio),
        tokens_per_second_per_device=Span(*(v / ratio for v in (rate.middle, rate.low, rate.high))),
        mfu=found.mfu / ratio,
        simulated=True,
        stage_layers=layers,
    )


def pipeline_seconds(layout: PlannedLayout, count: int, seconds: StageSeconds) -> float:
    """Seconds of a step's pipeline.

    Once full, a pipeline does the same over and over: of many micro-batches two shorter steps are
    played, and their difference tells what each further one costs.
    """

    def played(micro_batches: int) -> float:
        order = orders(layout.schedule, layout.pp, micro_batches, layout.virtual)
        return simulate(order, seconds).seconds

    few, more = (2 * times * layout.pp for times in PLAYED)
    if count <= more:
        return played(count)
    one, other = played(few), played(more)
    return one + (count - few) * (other - one) / (more - few)


def micro_batch(model: Architecture, found: PlanCandidate, lora: bool) -> PlannedMicroBatch:
    """One micro-batch's seconds out of those of a step.

    Products and attention have passes of 1:2 and 1:2.5 forward to backward, half of the backward
    products are weights' gradients (none of frozen weights), recomputation precedes backward.
    """
    layout, count = found.layout, found.micro_batches
    part = {name: value * layout.pp / count for name, value in found.step_parts.items()}
    products, attention, told = part["compute"], part["attention"], part["tp"] + part["ep"]
    weights = 0.0 if lora else products / 3
    forward = products / (2 if lora else 3) + attention / 3.5 + told / 2
    whole = products + attention + told + part["recompute"]
    # Taken apart as the prediction put it together: uneven stages, handing over, bubble.
    mean = (whole + part["head"]) / layout.pp
    slow = max(mean, _slowest(model, layout, whole, part["head"]))
    backward = mean * 2 / 3
    bubble = idle_seconds(
        layout.schedule, layout.pp, mean - backward, backward / 2, backward / 2, layout.virtual
    )
    waits = found.step_parts["pp"] - count * (slow - mean) - bubble
    sends = max(0.0, waits / (count + bubble / mean))
    return PlannedMicroBatch(forward, whole - forward - weights, weights, part["head"], sends)


def _slowest(model: Architecture, layout: PlannedLayout, layers: float, head: float) -> float:
    """The slowest stage where layers are dealt evenly, as the closed form has it."""
    dealt_evenly = stage_layers(model.layers, layout.pp, layout.virtual)
    one = layers / model.layers
    return float(np.maximum(dealt_evenly.most * one, dealt_evenly.last * one + head))


def stages(
    model: Architecture, layout: PlannedLayout, one: PlannedMicroBatch
) -> tuple[tuple[int, ...], StageSeconds]:
    """Layers per stage (of every chunk where stages are interleaved), and their seconds."""
    chunks = layout.pp * layout.virtual
    layers = layers_per_stage(model.layers, chunks, one.head / (one.layers / model.layers))
    send = one.sends / layout.virtual / 2
    forward, inputs, weights = (
        [getattr(one, name) / model.layers * n for n in layers]
        for name in ("forward", "inputs", "weights")
    )
    for part in (forward, inputs, weights):
        part[-1] += one.head / 3
    return tuple(layers), StageSeconds(
        tuple(s + send for s in forward), tuple(s + send for s in inputs), tuple(weights)
    )


def layers_per_stage(layers: int, stages: int, head: float) -> list[int]:
    """Layers of each stage, the last of which also has a head as long as ``head`` layers.

    One layer at a time to the stage that is least loaded: the largest load is then the least
    possible, since all layers are alike.
    """
    counts = [1] * stages
    loads = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        least = min(range(stages), key=loads.__getitem__)
        counts[least] += 1
        loads[least] += 1
    return counts


MOST_CELLS = 3000  # more boxes than that are slow to show and can't be told apart


def draw_schedule(
    schedule: str, stages: int, micro_batches: int, virtual: int, seconds: StageSeconds
) -> str:
    """A schedule drawn with its stages' own lengths.

    Of many micro-batches only so many are drawn that all phases are seen; the title says so.
    """
    fits = MOST_CELLS // (3 * stages * virtual)
    few = max(2 * stages, fits // stages * stages)
    shown = min(micro_batches, few)
    table = simulate(orders(schedule, stages, shown, virtual), seconds)
    title = f"{schedule}, {stages} stages, {shown} micro-batches"
    title += f" drawn of {micro_batches}" if shown < micro_batches else ""
    return drawing(table.passes(), title)
