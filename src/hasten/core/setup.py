"""A setup has one field per slot; techniques edit it, and nothing runs until it is assembled.

Defaults are the plain way, so the step needs no ``if``; parts satisfy the protocols by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.contracts import (
    Adjusting,
    Agreement,
    Average,
    Checkpointing,
    Engine,
    FixedSettings,
    GivenPrecision,
    LossScaling,
    ModelRouting,
    NoAverage,
    NoCheckpoint,
    NoCompression,
    NoLossScaling,
    NoSpikes,
    Precision,
    Routing,
    SpikeWatching,
    SumsEachStep,
    Wire,
)
from hasten.core.facts import Facts
from hasten.core.health import Guards
from hasten.core.job import (
    Collate,
    Job,
    MicroBatch,
    OptimizerFactory,
    Sampler,
    ShuffledOrder,
    StepBatch,
)
from hasten.core.layout import Layout, OneProcess, SplitsState, SplitsWeights
from hasten.core.plan import Plan
from hasten.core.timing import Clock, NoPhaseTimer
from hasten.errors import InputError

Edit = Callable[[nn.Module], None]
Cut = Callable[[Sequence[Any]], list[list[Any]]]
Attempt = Callable[[Engine, StepBatch], tuple[Tensor, StepBatch]]
Feed = Callable[[Iterator[tuple[MicroBatch, ...]], str], Iterator[tuple[MicroBatch, ...]]]


def in_one_piece(records: Sequence[Any]) -> list[list[Any]]:
    """BATCH: all of a rank's records of a step are one micro-batch."""
    return [list(records)]


def run_once(engine: Engine, batch: StepBatch) -> tuple[Tensor, StepBatch]:
    """BATCH: a step's passes are run once; an error ends the run. The loss sum, and what ran."""
    return engine.gradients(batch.micro_batches, batch.counts.trained_tokens), batch


def copy_to_device(
    steps: Iterator[tuple[MicroBatch, ...]], device: str
) -> Iterator[tuple[MicroBatch, ...]]:
    """FEED: copy each step's micro-batches to the device when they are needed."""
    for micro_batches in steps:
        yield tuple(m.to(device) for m in micro_batches)


def leave_model(module: nn.Module) -> None:
    """The default edit of a model: none."""


@dataclass
class Setup:
    """A training run before it is built: the job, the plan, and one field per slot."""

    job: Job
    plan: Plan
    facts: Facts
    folder: Path | None = None  # for checkpoints; None: a technique that writes is refused
    sampler: Sampler | None = None
    collate: Collate | None = None
    feed: Feed = copy_to_device
    cut: Cut = in_one_piece
    attempt: Attempt = run_once  # how a step's passes are run; BATCH may cut and run them again
    adapter: Callable[[nn.Module], nn.Module] | None = None
    routing: Routing = field(default_factory=ModelRouting)
    experts: Edit = leave_model
    attention: Edit = leave_model
    layers: Edit = leave_model
    loss: Callable[[nn.Module], nn.Module] | None = None
    objective: Edit = leave_model  # of the loss module
    recompute: Edit = leave_model
    compile: Edit = leave_model
    precision: Precision = field(default_factory=GivenPrecision)
    loss_scale: LossScaling = field(default_factory=NoLossScaling)  # PRECISION brings one with fp16
    layout: Layout = field(default_factory=OneProcess)
    wire: Wire = field(default_factory=NoCompression)
    optimizer: OptimizerFactory | None = None
    average: Average = field(default_factory=NoAverage)
    checkpoint: Checkpointing = field(default_factory=NoCheckpoint)
    threads: Callable[[], None] = lambda: None
    allocator: Callable[[], None] = lambda: None
    engine: Callable[[Any], Engine] | None = None  # of EngineParts; a LAYOUT may bring its own
    clock: Clock = field(default_factory=NoPhaseTimer)  # counts what a step's time goes into
    guards: Guards = field(default_factory=Guards)  # what each step is checked for
    spikes: SpikeWatching = field(default_factory=NoSpikes)  # what follows from a loss that rises
    adjusting: Adjusting = field(
        default_factory=FixedSettings
    )  # changes settings between two steps

    @property
    def agreement(self) -> Agreement:
        """What ranks tell each other in a step; a wire may have its own way."""
        return self.wire if isinstance(self.wire, Agreement) else SumsEachStep(self.layout)


def prepare(job: Job, plan: Plan, facts: Facts, folder: Path | None = None) -> Setup:
    """The job's own way of doing everything, then each technique's edit.

    Raises:
        InputError: several ranks, and nothing in the plan says which holds what; or checkpoints of
            ranks that hold different parts.
    """
    setup = Setup(job, plan, facts, folder)
    setup.collate = job.collate
    setup.adapter = job.adapter
    if job.routing is not None:
        setup.routing = job.routing()
    setup.loss = job.loss
    setup.optimizer = job.optimizer
    if len(job.records):
        setup.sampler = ShuffledOrder(job.lengths, job.batch, job.seed)
    for technique in plan:
        technique.apply(setup)
    if facts.world.size != setup.layout.size:
        raise InputError(
            f"plan: {facts.world.size} ranks are running but the layout is for "
            f"{setup.layout.size}; add a layout technique to the plan"
        )
    _check_saved(setup)
    return setup


def _check_saved(setup: Setup) -> None:
    """A state that is written has to be a whole one."""
    if setup.layout.whole or isinstance(setup.checkpoint, NoCheckpoint):
        return
    if not isinstance(setup.layout, SplitsState | SplitsWeights):
        raise InputError(
            "plan: checkpoints are written of ranks that each hold the whole model, and this "
            "layout gives them parts; leave checkpoints out, or take ddp as the layout"
        )
    if not isinstance(setup.average, NoAverage):
        raise InputError(
            "plan: a running average of weights that are dealt out over ranks can't be part of a "
            "checkpoint; leave checkpoints or the average out, or take ddp as the layout"
        )


def obstacles(plan: Plan, facts: Facts) -> list[str]:
    """Every reason why this plan can't work on this job, each starting with its technique."""
    return [f"{t.name()}: {reason}" for t in plan for reason in t.obstacles(facts)]


def on_device(module: nn.Module, device: str) -> nn.Module:
    """Move a module unless it is already there (a given module keeps its identity)."""
    return module.to(torch.device(device))
