"""Balanced routing on several ranks; returns plain JSON values."""

from __future__ import annotations

from typing import Any

from hasten.core.job import Stop
from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.nn.router_balance import routers
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.routing import BalancedRouting
from tiny import examples, job_context, language_job, tiny_model

CASES: dict[str, tuple[Technique, ...]] = {
    "deepseek_v3": (BalancedRouting(speed=0.01, sequence_loss=0.05),),
    "deepseek_v3, accumulated": (
        BalancedRouting(speed=0.01, sequence_loss=0.05),
        GradientAccumulation(micro_batch_size=1),
        LabelledTokenLoss(),
    ),
    "deepseek_v2": (BalancedRouting(speed=0.0, sequence_loss=0.05),),
}


def session_on(world: World, case: str) -> Session:
    """Nine examples in fours: the last step has one, and a rank without any."""
    architecture = case.split(",")[0]
    job = language_job(
        lambda: tiny_model(architecture), data=examples(9), batch=4, stop=Stop(epochs=1), lr=1e-3
    )
    techniques = CASES[case] + ((DDP(),) if world.size > 1 else ())
    context = job_context(job, architecture, world)
    return assemble(prepare(job, Plan(techniques), context))


def train_all(world: World) -> dict[str, Any]:
    found = {}
    for case in CASES:
        session = session_on(world, case)
        steps = list(training(session))
        found[case] = {
            "losses": [m.loss for m in steps],
            "ratios": [m.expert_load_ratio for m in steps],
            "biases": [
                b.tolist()
                for r in routers(session.model)
                if (b := getattr(r, "e_score_correction_bias", None)) is not None
            ],
        }
    return found
