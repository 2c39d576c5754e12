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

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hasten.core import facts
from hasten.core.batch import StepBatch
from hasten.core.clock import (
    BACKWARD,
    BETWEEN,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    IDLE,
    OPTIMIZER,
)
from hasten.core.session import Session, batches

MAX_SKIPPED = 10  # steps in a row without finite gradients, after which a run is lost


class NotFiniteError(RuntimeError):
    """Loss or gradients stayed infinite or NaN for several steps; no weight was touched by them."""


@dataclass(frozen=True)
class StepMetrics:
    """What one step did and cost, over all ranks; a line of ``metrics.jsonl``.

    ``grad_norm`` is the norm before clipping; a step that was ``skipped`` moved nothing;
    ``model_flops`` and ``mfu`` are None where the session's meter doesn't know them, and the
    seconds of the step's parts, on this rank, where its clock doesn't count.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    slots: int
    records: int
    step_seconds: float
    tokens_per_second: float
    padding_share: float
    peak_memory_bytes: int
    model_flops: float | None
    mfu: float | None
    skipped: bool = False
    expert_load_ratio: float | None = None
    data_seconds: float | None = None
    passes_seconds: float | None = None
    optimizer_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that isn't finite becomes None, which JSON can say."""
        found = asdict(self)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in found.items()
        }


def train_step(session: Session, batch: StepBatch, started: float) -> StepMetrics:
    """Gradients, norm, update; ``started`` is when the step began to wait for its data."""
    factor, clock = session.setup.job.schedule(session.progress.step), session.setup.clock
    loss_sum, batch = session.setup.attempt(session.engine, batch)
    clock.mark(BACKWARD)
    norm, finite = session.engine.norm()
    if finite:
        session.engine.update(factor)
    else:
        session.engine.discard()
        session.setup.agreement.skipped()
    clock.mark(OPTIMIZER)
    return _note(session, batch, loss_sum, norm, finite, started)


def training(session: Session) -> Iterator[StepMetrics]:
    """Train until the job's stop or until somebody sets ``session.stop_requested``.

    Raises:
        NotFiniteError: ten steps in a row had no finite gradient.
    """
    skipped, clock = 0, session.setup.clock
    clock.begin()
    started = time.perf_counter()
    for batch in batches(session):
        metrics = train_step(session, batch, started)
        skipped = _failures(session, metrics, skipped)
        if skipped == MAX_SKIPPED:
            raise NotFiniteError(
                f"the gradients were not finite for {skipped} steps in a row, up to step "
                f"{metrics.step}; the weights are those before them: lower the learning rate, or "
                "look at the records of these steps"
            )
        clock.mark(BETWEEN)
        session.setup.checkpoint.after_step(session)
        clock.mark(CHECKPOINT)
        yield metrics
        clock.begin()
        started = time.perf_counter()


def _failures(session: Session, metrics: StepMetrics, before: int) -> int:
    """Steps in a row that failed, this one included.

    A step given up while the loss scale falls is neither a failure nor a success; one whose loss
    itself wasn't finite is a failure at any scale.
    """
    if not metrics.skipped:
        return 0
    searching = session.setup.loss_scale.searching and math.isfinite(metrics.loss)
    return before if searching else before + 1


def _note(
    session: Session,
    batch: StepBatch,
    loss_sum: torch.Tensor,
    norm: float,
    finite: bool,
    started: float,
) -> StepMetrics:
    progress = session.progress
    slots = float(sum(m.counts.slots for m in batch.micro_batches))  # as they ran: BATCH may cut
    mine = torch.tensor([loss_sum.item(), slots], dtype=torch.float64)  # the device is done: norm()
    total, slots = session.setup.agreement.sum(mine).tolist()  # has waited for it
    session.setup.clock.mark(COMMUNICATION)
    counts = replace(batch.counts, slots=int(slots))
    seconds = time.perf_counter() - started
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
        grad_norm=norm,
        tokens=counts.tokens,
        trained_tokens=counts.trained_tokens,
        slots=counts.slots,
        records=counts.records,
        step_seconds=seconds,
        tokens_per_second=counts.tokens / seconds,
        padding_share=counts.padding_share,
        peak_memory_bytes=facts.memory_peak(session.setup.job.device),
        model_flops=flops,
        mfu=session.meter.mfu(flops, seconds),
        skipped=not finite,
        expert_load_ratio=session.setup.routing.load_ratio(),
        data_seconds=parts.get(DATA),
        passes_seconds=parts.get(FORWARD, 0.0) + parts[BACKWARD] if parts else None,
        optimizer_seconds=parts.get(OPTIMIZER),
    )
