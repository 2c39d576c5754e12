"""Finds the best layouts of a job on a cluster.

  1. Every layout that hasten's trainer runs, within the rules of divisibility.
  2. All predicted at once (``predict``).
  3. The best few, with their pipelines simulated in the order in which the trainer runs them.
  4. The fastest layouts that fit, each with another division of the devices, and the lines
     of a recipe for them.

If nothing fits, the error names changes that would fit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.machine.accelerators import DEVICES
from hasten.models.architecture import Architecture
from hasten.parts.distributed.pipeline.schedules import SCHEDULES as TRAINED
from hasten.parts.distributed.pipeline.schedules import (
    SPLIT,
    StageSeconds,
    orders,
    simulate,
    stages_per_rank,
    why_impossible,
)
from hasten.parts.distributed.tensor_plans import TENSOR_PARALLEL
from hasten.planner.cluster import Cluster
from hasten.planner.layout import (
    COMPRESSIONS,
    SCHEDULES,
    Layouts,
    PlannedJob,
    PlannedLayout,
)
from hasten.planner.numbers import Calibration
from hasten.planner.predict import PlanCandidate, Prediction, Span, candidate, predict
from hasten.planner.seconds import bubble_stages, stage_seconds

Model = Architecture | Mapping[str, Any] | str | Path
Deal = tuple[int, int, int, int]  # dp, tp, pp, ep
MOST_TOKENS = 131_072  # tokens of one micro-batch; larger ones gain nothing
ONLY_FP16 = ("v100", "t4")  # devices without bf16
# Architectures with layers that may be on several ranks; the techniques have the same lists.
STAGED = (*TENSOR_PARALLEL, "qwen3_moe")


@dataclass(frozen=True)
class LayoutSpace:
    """Formats of products (default: the device's 16 bits); lossy: also fp8 and compression."""

    precisions: tuple[str, ...] = ()
    lossy: bool = False


def enumerate_layouts(
    model: Architecture, cluster: Cluster, job: PlannedJob, space: LayoutSpace | None = None
) -> Layouts:
    """Returns all layouts that the trainer supports, as columns.

    The trainer shards weights and optimizer over replicas, alone or with tensor parallelism.
    Pipeline stages and expert parallelism combine with replicas, and recompute full layers or
    nothing. Schedules that split the backward pass recompute nothing. Stages with shared experts
    have one schedule, micro-batches of one row, and recompute nothing. Gradients are compressed
    between replicas of the full model.

    Raises:
        InputError: the devices don't support the requested formats.
    """
    space = space or LayoutSpace()
    chip = cluster.device
    own_format = "fp16" if chip.name.startswith(ONLY_FP16) else "bf16"
    formats = space.precisions or (own_format, *(["fp8"] if space.lossy else []))
    usable = [name for name in formats if name != "fp8" or chip.peak8 > 0]
    if not usable:
        raise InputError(f"format: {chip.name} has no unit for products in {' or '.join(formats)}")
    layouts = []
    for dp, tp, pp, ep in _deals(model, cluster, job):
        in_parts = pp > 1 or ep > 1
        zeros = range(4) if dp > 1 and not in_parts else (0,)
        recomputes = ("none", "full") if in_parts else ("none", "selective", "full")
        precisions = [name for name in usable if name != "fp8" or tp == 1]
        replicated = dp > 1 and tp == 1 and not in_parts
        compressions = COMPRESSIONS if replicated and space.lossy else ("none",)
        share = job.global_batch // dp
        for micro in (2**k for k in range(18)):
            if micro > max(1, MOST_TOKENS // job.sequence) or share % micro:
                continue
            schedules = _schedules(model, pp, share // micro)
            chosen = itertools.product(zeros, schedules, recomputes, precisions, compressions)
            for zero, (schedule, virtual), recompute, precision, compression in chosen:
                if recompute == "full" and schedule in SPLIT:
                    continue
                if pp > 1 and ep > 1 and (micro, schedule, recompute) != (1, "1f1b", "none"):
                    continue
                layouts.append(
                    PlannedLayout(
                        *(dp, tp, pp, ep, 1, zero, micro, schedule, virtual),
                        *(recompute, precision, compression),
                    )
                )
    return Layouts.of(layouts)


def _deals(model: Architecture, cluster: Cluster, job: PlannedJob) -> Iterator[Deal]:
    """Yields divisions of the devices: replicas, stages of them, or pieces of layers.

    Replicas of the same stage may share experts.
    """
    devices, family = cluster.devices, model.family
    deals: list[Deal] = [(devices, 1, 1, 1)]
    if not family or family in TENSOR_PARALLEL:
        heads = math.gcd(model.heads, model.kv_heads)
        sizes = _divisors(math.gcd(cluster.per_node, heads))
        deals += [(devices // tp, tp, 1, 1) for tp in sizes]
    if not family or family in STAGED:
        deals += [(devices // pp, 1, pp, 1) for pp in _divisors(devices) if pp <= model.layers]
        count = model.moe.count if model.moe else 1
        staged = [(dp, pp) for dp, tp, pp, _ in deals if tp == 1]
        deals += [(dp, 1, pp, ep) for dp, pp in staged for ep in _divisors(math.gcd(dp, count))]
    return (deal for deal in dict.fromkeys(deals) if job.global_batch % deal[0] == 0)


def _schedules(model: Architecture, pp: int, count: int) -> list[tuple[str, int]]:
    """Returns (schedule, stages of a rank); 1f1b without stages."""
    if pp == 1:
        return [("1f1b", 1)]
    virtual = {name: stages_per_rank(name) for name in TRAINED if name in SCHEDULES}
    return [
        (name, each)
        for name, each in virtual.items()
        if pp * each <= model.layers
        and not why_impossible(name, pp, count)
        and (each == 1 or count % pp == 0)  # interleaving is predicted for multiples only
    ]


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@dataclass(frozen=True)
class EvaluatedLayouts:
    """All layouts on one cluster, with their predictions."""

    cluster: Cluster
    job: PlannedJob
    layouts: Layouts
    predictions: Prediction

    def candidate(self, row: int) -> PlanCandidate:
        return candidate(self.predictions, self.layouts, row, self.cluster, self.job)

    def order(self) -> NDArray[np.int64]:
        """Returns the rows that fit, sorted by time, then by memory."""
        rows = np.flatnonzero(self.predictions.fits)
        seconds = np.round(np.log(self.predictions.step_seconds[rows]), 3)
        return np.asarray(rows[np.lexsort((self.predictions.memory_p90[rows], seconds))])

    def quickest(self, count: int) -> list[PlanCandidate]:
        """Returns the fastest layouts that fit, one for each division of devices and schedule."""
        chosen: dict[tuple[float, ...], int] = {}
        rows = self.layouts
        columns = [rows.dp, rows.tp, rows.pp, rows.ep, rows.schedule]
        for row in self.order():
            chosen.setdefault(tuple(float(c[row]) for c in columns), int(row))
            if len(chosen) == count:
                break
        return [self.candidate(row) for row in chosen.values()]


@dataclass(frozen=True)
class ClusterPlan:
    """The planner's result; ``best`` by time, each with another division of the devices."""

    model: Architecture
    cluster: Cluster
    job: PlannedJob
    layouts: int  # number of predicted layouts
    best: tuple[PlanCandidate, ...]
    calibration: Calibration | None


def plan(
    model: Model,
    cluster: Cluster | CloudConfig,
    job: PlannedJob,
    *,
    device: str = "",
    space: LayoutSpace | None = None,
    top: int = 5,
    calibration: Calibration | None = None,
) -> ClusterPlan:
    """Returns the best layouts of a job on a cluster that hasten's trainer supports.

    Args:
        model: an architecture, a config's fields or file, or a preset's name.
        cluster: a ``Cluster``, or a ``CloudConfig`` with devices that ``device`` names.
        job: tokens per sequence, sequences per step, total tokens.
        space: formats and compression that may vary, which change the mathematics.
        top: number of layouts in ``best``.
        calibration: fitted constants; default: those of the package.

    Raises:
        InputError: unknown names, or no layout that fits; the message names changes that
            help.
    """
    architecture = model if isinstance(model, Architecture) else Architecture.from_config(model)
    machines = Cluster.of(cluster, device) if isinstance(cluster, CloudConfig) else cluster
    if top < 1:
        raise InputError(f"top is {top}: give at least 1")
    lora = job.task == "lora"
    evaluated = evaluate_layouts(architecture, machines, job, space, calibration)
    if not np.any(evaluated.predictions.fits):
        raise InputError(nothing_fits(architecture, evaluated, space, calibration))
    played = [resimulated(architecture, one, lora) for one in evaluated.quickest(3 * top)]
    by_deal: dict[Deal, PlanCandidate] = {}
    for one in sorted(played, key=lambda c: c.step_seconds.middle):
        layout = one.layout
        by_deal.setdefault((layout.dp, layout.tp, layout.pp, layout.ep), one)
    best = tuple(by_deal.values())[:top]
    count = len(evaluated.layouts)
    return ClusterPlan(architecture, machines, job, count, best, calibration)


def nothing_fits(
    model: Architecture,
    evaluated: EvaluatedLayouts,
    space: LayoutSpace | None,
    calibration: Calibration | None,
) -> str:
    """Returns a sentence on the smallest layout's need, and on changes that would fit.

    These changes are predicted: more nodes, a larger device, LoRA, shorter sequences.
    """
    cluster, job = evaluated.cluster, evaluated.job

    def fits(cluster: Cluster = cluster, **changes: Any) -> bool:
        try:
            tried = evaluate_layouts(model, cluster, replace(job, **changes), space, calibration)
        except InputError:
            return False
        return bool(np.any(tried.predictions.fits))

    fixes = []
    for times in (2, 4, 8, 16, 32, 64):
        nodes = cluster.nodes * times
        batch = max(job.global_batch, nodes * cluster.per_node)
        if fits(replace(cluster, nodes=nodes), global_batch=batch):
            more = "" if batch == job.global_batch else f" with a global batch of {batch}"
            fixes.append(f"on {nodes} nodes{more}")
            break
    for chip in sorted(DEVICES.values(), key=lambda d: d.memory_bytes):
        larger = chip.memory_bytes > cluster.device.memory_bytes
        if larger and fits(replace(cluster, device=chip)):
            fixes.append(f"on as many {chip.name}")
            break
    if job.task != "lora" and fits(task="lora"):
        fixes.append("as a LoRA")
    if job.sequence > 2048 and fits(sequence=2048):
        fixes.append("with sequences of 2,048 tokens")
    fit = f"it would fit {' or '.join(fixes)}" if fixes else "no change that was tried would fit"
    predictions = evaluated.predictions
    on_device = np.flatnonzero(predictions.memory_p90 <= cluster.device.memory_bytes)
    if len(on_device):
        one = evaluated.candidate(int(on_device[np.argmin(predictions.host.most[on_device])]))
        phase = max(one.host_bytes, key=one.host_bytes.__getitem__)
        return (
            f"{model.name} doesn't fit into the memory of a node: of its layouts that fit on the "
            f"devices, the leanest needs {one.host_bytes[phase] / 1e9:.1f} GB of "
            f"{cluster.host_memory / 1e9:.1f} (--host-memory) in the phase {phase}; {fit}"
        )
    leanest = evaluated.candidate(int(np.argmin(predictions.memory_p90)))
    part = max(leanest.memory_parts, key=leanest.memory_parts.__getitem__)
    return (
        f"{model.name} doesn't fit on {cluster.devices} x {cluster.device.name}: its leanest "
        f"layout needs {leanest.memory_bytes.high / 1e9:.1f} GB (P90) of "
        f"{cluster.device.memory_bytes / 1e9:.1f}, most of it {part} "
        f"({leanest.memory_parts[part] / 1e9:.1f} GB); {fit}"
    )


def evaluate_layouts(
    model: Architecture,
    cluster: Cluster,
    job: PlannedJob,
    space: LayoutSpace | None = None,
    calibration: Calibration | None = None,
) -> EvaluatedLayouts:
    """Predicts all layouts on a cluster.

    Raises:
        InputError: no layout is possible.
    """
    rows = enumerate_layouts(model, cluster, job, space)
    if not len(rows):
        raise InputError(
            f"no layout of {cluster.devices} devices suits a global batch of {job.global_batch} "
            f"sequences: give a multiple of {cluster.devices}, or of a large share of it"
        )
    predictions = predict(model, cluster, job, rows, calibration)
    return EvaluatedLayouts(cluster, job, rows, predictions)


# The planner's word -> entries of a plan; ``selective`` stores half of each layer's bytes.
_RECOMPUTES: Mapping[str, list[str]] = {
    "none": [],
    "full": ["activation_checkpointing"],
    "selective": ["activation_checkpointing: {budget: 0.5}"],
}
# Techniques whose weights and optimizer state have the planner's number of bytes, except fp16's.
_PRECISIONS: Mapping[str, list[str]] = {
    "bf16": ["bf16_master_weights"],
    "fp16": ["autocast: {dtype: fp16}"],
    "fp8": ["float8"],
    "fp32": [],
}
_COMMUNICATIONS: Mapping[str, list[str]] = {
    "none": [],
    "int8": ["quantised: {bits: 8}"],
    "int4": ["quantised: {bits: 4}"],
    "topk1": ["topk: {ratio: 0.01}"],
}


def recipe_lines(one: PlanCandidate) -> str:
    """Returns the layout as lines of a recipe; on several nodes ``hasten launch`` sets the ranks.

    For ZeRO's stages 1 and 2, FSDP2 doesn't free the full weights between passes.
    """
    layout = one.layout
    sharded = layout.zero > 0
    lines = [f"nproc: {one.devices}"] if one.devices > one.cluster.nodes == 1 else []
    plan: list[str] = []
    shown: dict[str, Any]
    if layout.ep > 1:
        stages = {"pp": layout.pp} if layout.pp > 1 else {}
        shown = {"dp": layout.dp, **stages, "ep": layout.ep}
    elif layout.pp > 1:
        sizes = {"stages": layout.pp, "micro_batch_size": layout.micro_batch}
        checkpoint = {"none": "never", "full": "always"}[layout.recompute]
        shown = {"pipeline": {**sizes, "schedule": layout.schedule, "checkpoint": checkpoint}}
    elif layout.tp > 1:
        shown = {"shard" if sharded else "dp": layout.dp, "tp": layout.tp}
        shown |= {"reshard": layout.zero == 3} if sharded else {}
    elif sharded:
        shown = {"fsdp2": {"reshard": layout.zero == 3}}
    else:
        shown = {"ddp": {}} if layout.dp > 1 else {}
    lines += [f"layout: {_inline(shown)}"] if shown else []
    if layout.pp == 1:
        plan.append(f"gradient_accumulation: {{micro_batch_size: {layout.micro_batch}}}")
        plan += _RECOMPUTES[layout.recompute]
    plan += _PRECISIONS[layout.precision]
    plan += _COMMUNICATIONS[layout.compression]
    lines += [f"plan: [{', '.join(plan)}]"] if plan else []
    return "\n".join(lines)


def _inline(setting: Any) -> str:
    """Returns YAML in one line."""
    if isinstance(setting, dict):
        return "{" + ", ".join(f"{key}: {_inline(one)}" for key, one in setting.items()) + "}"
    return str(setting).lower() if isinstance(setting, bool) else str(setting)


# Simulation of a candidate's pipeline.
#
# The prediction of many layouts uses the schedule's closed form. For the best few, the trainer's
# order is simulated, with layers distributed so that the slowest stage is as fast as possible. The
# last stage has the head and the loss, which take as long as several layers if the vocabulary is
# large. Other parts of the step keep their predictions.

MOST_STAGES = 32  # for more stages torch takes seconds to list the order
PLAYED = 2, 3  # simulated micro-batches of a long step, in units of twice the stages
PIPELINE = ("compute", "attention", "head", "recompute", "tp", "pp", "ep")


@dataclass(frozen=True)
class PlannedMicroBatch:
    """Seconds of one micro-batch: all layers, the head, and sends of one rank."""

    forward: float
    inputs: float
    weights: float
    head: float
    sends: float

    @property
    def layers(self) -> float:
        return self.forward + self.inputs + self.weights


def resimulated(model: Architecture, candidate: PlanCandidate, lora: bool = False) -> PlanCandidate:
    """Returns the candidate with a simulated pipeline; unchanged without one, or if it is long."""
    layout, count = candidate.layout, candidate.micro_batches
    if not 1 < layout.pp <= MOST_STAGES:
        return candidate
    one = micro_batch(model, candidate, lora)
    layers, seconds = stages(model, layout, one)
    pipeline = pipeline_seconds(layout, count, seconds)
    before = sum(candidate.step_parts[part] for part in PIPELINE)
    parts = candidate.step_parts | {"pp": candidate.step_parts["pp"] + pipeline - before}
    ratio = sum(parts.values()) / candidate.step_seconds.middle
    rate = candidate.tokens_per_second_per_device
    return replace(
        candidate,
        step_parts=parts,
        step_seconds=candidate.step_seconds.times(ratio),
        tokens_per_second_per_device=Span(*(v / ratio for v in (rate.middle, rate.low, rate.high))),
        mfu=candidate.mfu / ratio,
        simulated=True,
        stage_layers=layers,
    )


def pipeline_seconds(layout: PlannedLayout, count: int, seconds: StageSeconds) -> float:
    """Returns the seconds of a step's pipeline.

    A full pipeline repeats the same work. For many micro-batches, two shorter steps are
    simulated, and their difference gives the cost of each further micro-batch.
    """

    def played(micro_batches: int) -> float:
        order = orders(layout.schedule, layout.pp, micro_batches)
        events = simulate([[(op,) for op in of_rank] for of_rank in order], seconds)
        return max(event.end for event in events)

    few, more = (2 * times * layout.pp for times in PLAYED)
    if count <= more:
        return played(count)
    one, other = played(few), played(more)
    return one + (count - few) * (other - one) / (more - few)


def micro_batch(model: Architecture, candidate: PlanCandidate, lora: bool) -> PlannedMicroBatch:
    """Returns one micro-batch's seconds, calculated from those of a step.

    Forward to backward, products have the ratio 1:2 and attention 1:2.5. Half of the
    backward products are weights' gradients (none for frozen weights). Recomputation
    precedes backward.
    """
    layout, count = candidate.layout, candidate.micro_batches
    part = {name: cost * layout.pp / count for name, cost in candidate.step_parts.items()}
    products, attention, comm_seconds = part["compute"], part["attention"], part["tp"] + part["ep"]
    weights = 0.0 if lora else products / 3
    forward = products / (2 if lora else 3) + attention / 3.5 + comm_seconds / 2
    total_seconds = products + attention + comm_seconds + part["recompute"]
    # The pipeline's part of the prediction is uneven stages + sends + bubble.
    rows = Layouts.of([layout])
    slow, mean = stage_seconds(model.layers, rows, total_seconds, part["head"])
    bubble = float(bubble_stages(rows)[0])
    waits = candidate.step_parts["pp"] - count * float((slow - mean)[0]) - bubble * float(mean[0])
    sends = max(0.0, waits / (count + bubble))
    return PlannedMicroBatch(
        forward, total_seconds - forward - weights, weights, part["head"], sends
    )


def stages(
    model: Architecture, layout: PlannedLayout, one: PlannedMicroBatch
) -> tuple[tuple[int, ...], StageSeconds]:
    """Returns layers per stage (per chunk if stages are interleaved), and their seconds."""
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
    """Returns the layers of each stage; the last one also has a head as long as ``head`` layers.

    Each layer goes to the stage with the least load. This minimises the largest load, because
    all layers take the same time.
    """
    counts = [1] * stages
    loads = [1.0] * (stages - 1) + [1.0 + head]
    for _ in range(layers - stages):
        least = min(range(stages), key=loads.__getitem__)
        counts[least] += 1
        loads[least] += 1
    return counts
