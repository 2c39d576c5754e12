"""A session is a run that has been built; ``assemble`` builds it and alone knows PyTorch's order.

    build -> ADAPTER, ROUTING -> EXPERTS, ATTENTION, LAYERS, LOSS -> LAYOUT.split, .within
    -> RECOMPUTE -> COMPILE -> PRECISION -> device -> LAYOUT.across with WIRE -> OPTIMIZER over the
    parameters as they are now -> engine -> batches

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

from hasten.core.batch import Counts, MicroBatch, StepBatch
from hasten.core.engine import Assembly, Engine
from hasten.core.meter import Meter
from hasten.core.setup import Setup, on_device
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
    meter: Meter = field(default_factory=Meter)

    def finish(self) -> nn.Module:
        """End of training: the model with its true weights, ready to be saved."""
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
    model = setup.adapter(job.build_model())
    built = time.perf_counter()
    setup.routing.prepare(model)
    for edit in (setup.experts, setup.attention, setup.layers):
        edit(model)
    loss_module = setup.loss(model)
    loss_module = setup.layout.within(setup.layout.split(loss_module))
    setup.recompute(loss_module)
    setup.compile(loss_module)
    setup.precision.prepare(loss_module)
    loss_module = on_device(loss_module, job.device).train()
    module = setup.layout.across(loss_module, setup.wire)
    optimizer = setup.optimizer((n, p) for n, p in module.named_parameters() if p.requires_grad)
    setup.precision.own(optimizer)
    engine = setup.engine(Assembly(setup, module, optimizer))
    seconds = {"model": built - began, "assembly": time.perf_counter() - built}
    # Ranks share the weights' seed; dropout must differ between them.
    torch.manual_seed(job.seed + 1 + setup.facts.world.rank)
    return Session(setup, model, loss_module, module, optimizer, engine, seconds)


def batches(session: Session) -> Iterator[StepBatch]:
    """Whole steps on the device until the job's stop, from where ``progress`` says.

    Every rank gets the same number of steps; the counts are those of all ranks together.
    """
    job, progress = session.setup.job, session.progress
    while job.stop.epochs is None or progress.epoch < job.stop.epochs:
        seen = 0
        for local in session.setup.feed(_local_steps(session.setup, progress), job.device):
            seen += 1
            if job.stop.reached(progress.step, progress.tokens):
                return
            batch = _agree(session, local)
            if batch is None:
                return
            progress.step_in_epoch += 1
            yield batch
        if not seen and not progress.step_in_epoch:
            raise InputError("the data has no steps: the loader or the records are empty")
        progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
        session.setup.checkpoint.after_epoch(session)


def _agree(session: Session, local: tuple[MicroBatch, ...]) -> StepBatch | None:
    """Counts over all ranks before the first backward; None when any rank wants to stop."""
    mine = sum((m.counts for m in local), Counts())
    flag = float(session.stop_requested)
    sums = session.setup.layout.sum(
        torch.tensor(
            [mine.records, mine.tokens, mine.slots, mine.trained_tokens, mine.pairs, flag],
            dtype=torch.float64,
        )
    ).tolist()
    if sums[5]:
        session.stop_requested = True
        return None
    counts = Counts(*(int(v) for v in sums[:5]))
    if not counts.trained_tokens:
        raise InputError("a step has no trained token: look at the records and their loss mask")
    return StepBatch(local, counts, session.progress.epoch)


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
    job, world = setup.job, setup.facts.world
    if job.stream is not None:
        for records in itertools.islice(job.stream(epoch), first, None):
            yield [records]
    elif setup.sampler is not None:
        steps = setup.sampler.local_steps(epoch, world.rank, world.size)
        for pieces in itertools.islice(steps, first, None):
            yield [[job.records[i] for i in piece] for piece in pieces]


def without_loss(micro_batch: MicroBatch) -> MicroBatch:
    """The same tensors with nothing that counts, for a rank that has no record of its own."""
    labels = torch.full_like(micro_batch.inputs["labels"], -100)
    return replace(
        micro_batch,
        inputs={**micro_batch.inputs, "labels": labels},
        counts=Counts(slots=micro_batch.counts.slots),
    )
