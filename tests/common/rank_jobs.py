"""Jobs that tests run on several ranks; each returns plain JSON values."""

from __future__ import annotations

from typing import Any

import torch

from hasten.core.job import Job, Stop
from hasten.core.loop import evaluate
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.average import WeightAverage
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.sampler import LengthGrouped, PackedEpoch
from tiny import examples, language_job, session_of, tiny_model

CASES: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "accumulated": (GradientAccumulation(micro_batch_size=2),),
    "packed, label-only": (
        Packed(),
        LabelledTokenLoss(chunk=16),
        GradientAccumulation(micro_batch_size=2),
    ),
    "packed epoch": (PackedEpoch(row_tokens=40), Packed()),
    "grouped": (LengthGrouped(window=5),),
    "recomputed, averaged": (
        ActivationCheckpointing(),
        WeightAverage(),
        GradientAccumulation(micro_batch_size=2),
    ),
    "masters, accumulated": (BF16MasterWeights(), GradientAccumulation(micro_batch_size=2)),
}


def job(case: str) -> Job:
    """Nine examples in fours: the last step of an epoch has one, fewer than there are ranks."""
    dtype = torch.float32 if "masters" in case else torch.float64
    return language_job(
        lambda: tiny_model(dtype=dtype), data=examples(9), batch=4, stop=Stop(epochs=2)
    )


def session_on(world: World, case: str, layout: Technique | None = None) -> Session:
    techniques = CASES[case] + ((layout or DDP(),) if world.size > 1 else ())
    made = job(case)
    return session_of(made, *techniques, world=world)


def train_all(world: World) -> dict[str, Any]:
    """Losses, norms, counts, eval loss and a weight of every case."""
    found = {}
    for case in CASES:
        session = session_on(world, case)
        steps = list(training(session))
        eval_data = evaluate(session).eval_loss
        effective = DDP().check_effect(session).effective
        sends_buffers = getattr(session.module, "broadcast_buffers", None)
        model: Any = session.finish()
        found[case] = {
            "losses": [m.loss for m in steps],
            "norms": [m.grad_norm for m in steps],
            "tokens": [m.tokens for m in steps],
            "trained": [m.trained_tokens for m in steps],
            "eval_data": eval_data,
            "weights": model.lm_head.weight[:2, :4].detach().double().flatten().tolist(),
            "replicated": effective,
            "sends buffers": sends_buffers,
        }
    found["stopped by one rank"] = _stopped_by_one(world)
    return found


def _stopped_by_one(world: World) -> int:
    """Only the last rank asks for a stop, after two steps; all must leave after the same one."""
    session = session_on(world, "plain")
    for metrics in training(session):
        if world.rank == world.size - 1 and metrics.step == 2:
            session.stop_requested = True
    return session.progress.step
