"""A session is a run that has been built; ``assemble`` builds it and alone knows PyTorch's order.

    build (a skeleton, where LAYOUT sends weights) -> ADAPTER, ROUTING
    -> EXPERTS, ATTENTION, LAYERS, LOSS, OBJECTIVE -> LAYOUT.split, .within -> RECOMPUTE -> COMPILE
    -> PRECISION -> device -> LAYOUT.across with WIRE -> OPTIMIZER over the parameters as they are
    now -> engine -> batches

Adapters come before anything that replaces modules, or the replaced ones would not be adapted;
precision comes before replication, or replicas would reduce in the wrong format; the optimizer
comes last, because every line before it may exchange parameters.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hasten.core.contracts import Engine, NoCheckpoint
from hasten.core.engine import EngineParts, PlainEngine
from hasten.core.job import MicroBatch, StepBatch, WorkCounts
from hasten.core.layout import PlacesModule, SendsWeights
from hasten.core.setup import Setup, on_device
from hasten.core.timing import CHECKPOINT, COMMUNICATION, DATA, Meter
from hasten.errors import InputError


@dataclass
class Progress:
    """How far a run is; what a checkpoint needs to find its place in the data."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    slots: int = 0
    micro_batches: int = 0  # passes on this rank
    trained_tokens: int = 0
    records: int = 0


SUMMED = ("tokens", "slots", "trained_tokens", "records")  # of progress, over all ranks


@dataclass
class Session:
    """A run's live objects.

    ``model`` is what gets saved, ``loss_module`` maps a micro-batch to (sum, count), ``module`` is
    that as the layout wrapped it.
    """

    setup: Setup
    model: nn.Module
    loss_module: nn.Module
    module: nn.Module
    optimizer: Optimizer
    engine: Engine
    startup_seconds: dict[str, float]
    progress: Progress = field(default_factory=Progress)
    stop_requested: bool = False
    stop_reason: str = "interrupted"  # of such a request, for the run's summary
    leaving: bool = False  # this machine goes away: what can wait is left out
    meter: Meter = field(default_factory=Meter)
    changes: list[str] = field(default_factory=list)  # since the checkpoint that it goes on from

    @property
    def saves(self) -> bool:
        """Whether CHECKPOINT may write."""
        return not isinstance(self.setup.checkpoint, NoCheckpoint)

    def settle(self) -> None:
        """Weights and progress of all ranks are the same after it; every rank calls it."""
        if not self.setup.agreement.apart:
            return
        self.setup.agreement.settle()
        # Each rank has counted its own work times the number of ranks: the mean is the truth.
        mine = torch.tensor([getattr(self.progress, n) for n in SUMMED], dtype=torch.float64)
        for name, total in zip(SUMMED, self.setup.layout.sum(mine).tolist(), strict=True):
            setattr(self.progress, name, round(total / self.setup.layout.data_size))

    def finish(self) -> nn.Module:
        """End of training: the model with its true weights, ready to be saved."""
        self.settle()
        self.setup.precision.finish(self.loss_module)
        return self.model

    def versions(self) -> Iterator[str]:
        """After ``finish``: what AVERAGE has to save, weights in place while each name is out."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.setup.average.versions(weights)


def assemble(setup: Setup) -> Session:
    """Build the run that a setup describes."""
    job = setup.job
    if setup.adapter is None or setup.loss is None or setup.optimizer is None:
        raise InputError("a setup comes from hasten.core.setup.prepare(job, plan, facts)")
    setup.threads()
    setup.allocator()
    torch.manual_seed(job.seed)
    began = time.perf_counter()
    model = setup.adapter(_built(setup))
    built = time.perf_counter()
    setup.routing.prepare(model)
    for edit in (setup.experts, setup.attention, setup.layers):
        edit(model)
    loss_module = setup.loss(model)
    setup.objective(loss_module)
    loss_module = setup.layout.within(setup.layout.split(loss_module))
    setup.recompute(loss_module)
    setup.compile(loss_module)
    setup.precision.prepare(loss_module)
    layout = setup.layout
    if not isinstance(layout, PlacesModule):
        loss_module = on_device(loss_module, job.device)
    module = layout.across(loss_module.train(), setup.wire)
    if isinstance(layout, PlacesModule):
        layout.place(module)
    optimizer = setup.optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
    try:
        setup.precision.own(optimizer)
    except ValueError as error:
        raise InputError(f"plan: {error}") from error
    engine = (setup.engine or PlainEngine)(EngineParts(setup, module, optimizer))
    seconds = {"model": built - began, "assembly": time.perf_counter() - built}
    # Ranks share the weights' seed; dropout must differ between those with different records.
    torch.manual_seed(job.seed + 1 + setup.layout.data_rank)
    return Session(setup, model, loss_module, module, optimizer, engine, seconds)


def _built(setup: Setup) -> nn.Module:
    """The model, or where this rank is sent its weights later, the same modules without any."""
    job, layout = setup.job, setup.layout
    if job.skeleton is None or not isinstance(layout, SendsWeights) or layout.builds:
        return job.build_model()
    return job.skeleton()


def batches(session: Session) -> Iterator[StepBatch]:
    """Whole steps on the device until the job's stop, from where ``progress`` says.

    Every rank gets the same number of steps; the counts are those of all ranks together.
    """
    job, progress, clock = session.setup.job, session.progress, session.setup.clock
    while job.stop.epochs is None or progress.epoch < job.stop.epochs:
        seen, source = 0, clock.reading(_local_steps(session.setup, progress))
        for local in session.setup.feed(source, job.device):
            seen += 1
            clock.fed()
            if job.stop.reached(progress.step, progress.tokens):
                return
            batch = _agree(session, local)
            clock.mark(COMMUNICATION)
            if batch is None:
                return
            progress.step_in_epoch += 1
            yield batch
        if not seen and not progress.step_in_epoch:
            raise InputError("the data has no steps: the loader or the records are empty")
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        clock.mark(DATA)  # the loader has said that there is no more
        session.setup.checkpoint.after_epoch(session)
        clock.mark(CHECKPOINT)


def _agree(session: Session, local: tuple[MicroBatch, ...]) -> StepBatch | None:
    """Counts over all ranks before the first backward; None when any rank wants to stop."""
    mine = sum((m.counts for m in local), WorkCounts())
    agreement = session.setup.agreement
    counts, stop = agreement.counts(mine, session.stop_requested)
    if stop:
        session.stop_requested = True
        return None
    if not counts.trained_tokens and not agreement.apart:
        raise InputError("a step has no trained token: look at the records and their loss mask")
    return StepBatch(_level(session, local), counts, session.progress.epoch)


def _level(session: Session, local: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    """Ranks that hold parts of a model meet in every pass: all make as many as the busiest.

    What is missing on a rank is its smallest micro-batch once more, without loss.
    """
    layout, world = session.setup.layout, session.setup.facts.world
    if layout.whole:
        return local
    passes = torch.zeros(world.size, dtype=torch.float64)
    passes[world.rank] = len(local)
    missing = int(layout.everywhere(passes).max()) - len(local)
    smallest = min(local, key=lambda m: m.counts.slots)
    return (*local, *[without_loss(smallest)] * missing) if missing else local


def _local_steps(setup: Setup, progress: Progress) -> Iterator[tuple[MicroBatch, ...]]:
    """This rank's micro-batches of the epoch, from the step that comes next."""
    collate = setup.collate or setup.job.collate
    for pieces in _local_pieces(setup, progress.epoch, progress.step_in_epoch):
        parts = [part for piece in pieces if piece for part in setup.cut(piece)]
        if parts:
            yield tuple(replace(collate(part), records=part) for part in parts)
        else:  # fewer records than ranks: take part in the step without any loss
            yield (without_loss(collate([setup.job.records[0]])),)


def _local_pieces(setup: Setup, epoch: int, first: int) -> Iterator[list[Sequence[Any]]]:
    """The records of each step from the ``first`` on, in the pieces that BATCH cuts one by one."""
    job, layout = setup.job, setup.layout
    if job.stream is not None:
        for records in itertools.islice(job.stream(epoch), first, None):
            yield [records]
    elif setup.sampler is not None:
        steps = setup.sampler.local_steps(epoch, layout.data_rank, layout.data_size)
        for pieces in itertools.islice(steps, first, None):
            yield [[job.records[i] for i in piece] for piece in pieces]


def step_outside(session: Session) -> tuple[MicroBatch, ...] | None:
    """The micro-batches of the epoch's first step, on the device; they don't count as progress.

    None where the user's own loader brings the batches: it would have to begin anew.
    """
    setup = session.setup
    if setup.job.stream is not None:
        return None
    found = next(_local_steps(setup, Progress(epoch=session.progress.epoch)), None)
    return None if found is None else tuple(m.to(setup.job.device) for m in found)


def without_loss(micro_batch: MicroBatch) -> MicroBatch:
    """The same tensors with nothing that counts, for a rank that has no record of its own."""
    labels = torch.full_like(micro_batch.inputs["labels"], -100)
    return replace(
        micro_batch,
        inputs={**micro_batch.inputs, "labels": labels},
        counts=WorkCounts(slots=micro_batch.counts.slots),
    )
