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
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hasten.core import facts
from hasten.core.batch import StepBatch
from hasten.core.session import Session, batches

MAX_SKIPPED = 10  # steps in a row without finite gradients, after which a run is lost


class NotFiniteError(RuntimeError):
    """Loss or gradients stayed infinite or NaN for several steps; no weight was touched by them."""


@dataclass(frozen=True)
class StepMetrics:
    """What one step did and cost, over all ranks; a line of ``metrics.jsonl``.

    ``grad_norm`` is the norm before clipping; a step that was ``skipped`` moved nothing.
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
    skipped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a number that isn't finite becomes None, which JSON can say."""
        found = asdict(self)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in found.items()
        }


def train_step(session: Session, batch: StepBatch, started: float) -> StepMetrics:
    """Gradients, norm, update; ``started`` is when the step began to wait for its data."""
    factor = session.setup.job.schedule(session.progress.step)
    loss_sum = session.setup.attempt(session.engine, batch)
    norm, finite = session.engine.norm()
    if finite:
        session.engine.update(factor)
    else:
        session.engine.discard()
    return _note(session, batch, loss_sum, norm, finite, started)


def training(session: Session) -> Iterator[StepMetrics]:
    """Train until the job's stop or until somebody sets ``session.stop_requested``.

    Raises:
        NotFiniteError: ten steps in a row had no finite gradient.
    """
    skipped = 0
    started = time.perf_counter()
    for batch in batches(session):
        metrics = train_step(session, batch, started)
        skipped = skipped + 1 if metrics.skipped else 0
        if skipped == MAX_SKIPPED:
            raise NotFiniteError(
                f"the gradients were not finite for {skipped} steps in a row, up to step "
                f"{metrics.step}; the weights are those before them: lower the learning rate, or "
                "look at the records of these steps"
            )
        session.setup.checkpoint.after_step(session)
        yield metrics
        started = time.perf_counter()


def _note(
    session: Session,
    batch: StepBatch,
    loss_sum: torch.Tensor,
    norm: float,
    finite: bool,
    started: float,
) -> StepMetrics:
    layout, progress, counts = session.setup.layout, session.progress, batch.counts
    total = layout.sum(loss_sum.detach().double().cpu()).item()  # the device is done: norm() waited
    seconds = time.perf_counter() - started
    progress.step += 1
    progress.tokens += counts.tokens
    progress.slots += counts.slots
    progress.micro_batches += len(batch.micro_batches)
    progress.trained_tokens += counts.trained_tokens
    progress.records += counts.records
    return StepMetrics(
        step=progress.step,
        epoch=batch.epoch,
        loss=total / counts.trained_tokens,
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
        skipped=not finite,
    )
