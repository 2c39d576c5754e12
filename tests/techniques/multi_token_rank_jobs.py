"""Multi-token prediction on replicas, on a rank."""

from __future__ import annotations

from typing import Any

from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.machine.environment import World
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.objective import MultiTokenPrediction
from tiny import job_context, language_job, run


def replicated(world: World) -> dict[str, Any]:
    job = language_job(steps=4)
    plan = Plan([MultiTokenPrediction(depth=2), DDP()])
    session = assemble(prepare(job, plan, job_context(job, world=world)))
    losses = [m.loss for m in run(session)]
    weights = [float(p.detach().double().sum()) for p in session.loss_module.parameters()]
    return {"losses": losses, "weights": weights}
