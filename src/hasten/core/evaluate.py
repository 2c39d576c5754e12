"""Held-out loss over every trained token of the held-out records, and the user's own metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hasten.core.order import share
from hasten.core.session import Session, without_loss

RECORDS_AT_ONCE = 16


@dataclass(frozen=True)
class Evaluation:
    """Quality of the model as it is now; the loss is None where nothing was held out."""

    step: int
    tokens: int
    held_out_loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "held_out_loss": self.held_out_loss,
            **self.metrics,
        }


def evaluate(session: Session) -> Evaluation:
    """Loss per trained token of the held-out records, and every metric of the job.

    Metrics are for ranks that can have the whole model: the first, and its replicas.
    """
    session.settle()
    progress, job = session.progress, session.setup.job
    metrics: dict[str, float] = {}
    with evaluating(session.loss_module):
        loss = held_out_loss(session)
        if job.metrics:
            with session.setup.layout.gather(session.model) as whole:
                if whole:
                    metrics = {n: float(metric(session.model)) for n, metric in job.metrics.items()}
    return Evaluation(progress.step, progress.tokens, loss, metrics)


def held_out_loss(session: Session) -> float | None:
    """Summed loss over trained tokens, divided by their number, over all ranks."""
    setup, held_out = session.setup, session.setup.job.held_out
    if not len(held_out):
        return None
    collate = setup.collate or setup.job.collate
    ranks = setup.layout.data_size
    mine = share(range(len(held_out)), setup.layout.data_rank, ranks)
    sums = torch.zeros(2, dtype=torch.float64)
    # Shards meet in every pass: a rank with fewer records takes part without any loss.
    for start in range(0, math.ceil(len(held_out) / ranks), RECORDS_AT_ONCE):
        records = [held_out[i] for i in mine[start : start + RECORDS_AT_ONCE]]
        batch = collate(records) if records else without_loss(collate([held_out[0]]))
        batch = batch.to(setup.job.device)
        with setup.precision.region():
            loss, _ = session.loss_module(**batch.inputs)
        sums += torch.tensor([float(loss), batch.counts.trained_tokens], dtype=torch.float64)
    total, count = setup.layout.sum(sums).tolist()
    return total / count if count else None


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; the mode before is restored, random state untouched."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            yield
    finally:
        module.train(was_training)
