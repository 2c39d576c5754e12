"""One step, as a story.

A *record* lies on disk in an Arrow file, tokenised once and memory-mapped since. The *sampler*
chooses which records share a step; the *collator* lays them out as one tensor, and knows how many
of its slots are tokens and how many tokens carry loss. The *feeder* brings the micro-batches to the
device. There the model turns tokens into *loss*, summed over trained tokens and divided by the
number of trained tokens of the whole step over all micro-batches and ranks, so that neither
micro-batch size, nor padding, nor rank count changes its meaning. Backward turns loss into
*gradients*, which leave over the *wire* while earlier layers are still at work. When the last is
back, the norm is taken, and if every rank saw finite numbers it is clipped and the *optimizer*
moves the weights. That is one step; what it cost is noted beside it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import torch

from hasten.core.contracts import StepNumbers, Traffic, traffic_of
from hasten.core.health import NotFiniteError
from hasten.core.job import StepBatch
from hasten.core.session import Session, batches
from hasten.core.timing import (
    BACKWARD,
    BETWEEN,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    IDLE,
    OPTIMIZER,
    StepMetrics,
)
from hasten.machine import host
from hasten.machine.processes import running_time

__all__ = ["NotFiniteError", "StepMetrics", "train_step", "training"]


def train_step(session: Session, batch: StepBatch, started: float) -> StepMetrics:
    """Gradients, norm, update; ``started`` is when the step began to wait for its data."""
    setup, clock = session.setup, session.setup.clock
    factor = setup.job.schedule(session.progress.step) * setup.spikes.rate
    loss_sum, batch = setup.attempt(session.engine, batch)
    clock.mark(BACKWARD)
    found = session.engine.norm(loss_sum)
    if found.finite:
        session.engine.update(factor)
    else:
        session.engine.discard()
        setup.agreement.skipped()
        setup.guards.given_up(found.loss_sum)
    clock.mark(OPTIMIZER)
    return _note(session, batch, found, started)


def training(session: Session) -> Iterator[StepMetrics]:
    """Train until the job's stop or until somebody sets ``session.stop_requested``.

    Who moves ``session.progress`` to another place of the data between two steps has the next one
    from there.

    Raises:
        NotFiniteError: several steps in a row had no finite loss and gradient.
        StoppedError: another of the setup's guards says that the run is lost.
    """
    with session.setup.checkpoint.running(session):
        while (yield from _steps(session)):  # again from where the session stands
            pass


def _steps(session: Session) -> Generator[StepMetrics, None, bool]:
    """Steps to the stop, or until the session went back or was moved: True then."""
    setup, clock, progress = session.setup, session.setup.clock, session.progress
    started = running_time()  # before the clock's: its parts never exceed the step
    clock.begin()
    for batch in batches(session):
        metrics = train_step(session, batch, started)
        setup.guards.after_step(session, batch, metrics)
        back = setup.spikes.goes_back(session, metrics)
        clock.mark(BETWEEN)
        if not (back or setup.spikes.suspects):  # a state that is kept is one to come back to
            setup.checkpoint.after_step(session)
        clock.mark(CHECKPOINT)
        place = progress.epoch, progress.step_in_epoch
        yield metrics
        if back or (progress.epoch, progress.step_in_epoch) != place:
            return True
        setup.adjusting.after_step(metrics)
        started = running_time()
        clock.begin()
    return False


def _note(
    session: Session,
    batch: StepBatch,
    found: StepNumbers,
    started: float,
) -> StepMetrics:
    progress = session.progress
    slots = float(sum(m.counts.slots for m in batch.micro_batches))  # as they ran: BATCH may cut
    mine = torch.tensor([found.loss_sum, slots], dtype=torch.float64)
    total, slots = session.setup.agreement.sum(mine).tolist()
    session.setup.clock.mark(COMMUNICATION)
    traffic = traffic_of(session.setup.layout)
    if traffic is not None and traffic.exposed is not None:
        session.setup.clock.exposed(traffic.during, traffic.exposed)
    counts = replace(batch.counts, slots=int(slots))
    seconds = running_time() - started
    session.setup.clock.mark(IDLE)
    parts = session.setup.clock.end()
    flops = session.meter.flops(counts)
    progress.step += 1
    progress.tokens += counts.tokens
    progress.slots += counts.slots
    progress.micro_batches += len(batch.micro_batches)
    progress.trained_tokens += counts.trained_tokens
    progress.records += counts.records
    return StepMetrics(
        step=progress.step,
        epoch=batch.epoch,
        loss=total / (counts.trained_tokens or 1),
        learning_rate=max(group["lr"] for group in session.optimizer.param_groups),
        grad_norm=found.norm,
        tokens=counts.tokens,
        trained_tokens=counts.trained_tokens,
        slots=counts.slots,
        records=counts.records,
        step_seconds=seconds,
        tokens_per_second=counts.tokens / seconds,
        padding_share=counts.padding_share,
        peak_memory_bytes=host.memory_peak(session.setup.job.device),
        model_flops=flops,
        mfu=session.meter.mfu(flops, seconds),
        skipped=not found.finite,
        expert_load_ratio=session.setup.routing.load_ratio(),
        data_seconds=parts.get(DATA),
        passes_seconds=parts.get(FORWARD, 0.0) + parts[BACKWARD] if parts else None,
        optimizer_seconds=parts.get(OPTIMIZER),
        **_of_the_wire(traffic, parts.get(COMMUNICATION, 0.0)),
    )


def _of_the_wire(traffic: Traffic | None, sums: float) -> dict[str, Any]:
    """The step's fields about traffic; ``sums`` are the seconds of what ranks tell each other."""
    if traffic is None:
        return {}
    if traffic.exposed is None:
        return {"wire_bytes": traffic.sent_bytes}
    exposed, hidden = traffic.exposed + sums, traffic.hidden
    return {
        "wire_seconds": None if hidden is None else exposed + hidden,
        "exposed_communication_seconds": exposed,
        "hidden_communication_seconds": hidden,
        "wire_bytes": traffic.sent_bytes,
    }
