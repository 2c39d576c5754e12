"""Jobs with fp16 that tests run on several ranks, where the last rank alone overflows."""

from __future__ import annotations

from typing import Any

import torch

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare, run_once
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.precision import Autocast
from tiny import examples, job_context, language_job

OVERFLOWS = (0, 1, 4)  # steps


def overflowing(world: World) -> dict[str, Any]:
    """Both ways of one rank's overflow: before gradients travel, and after they have."""
    return {
        where: _run(world, where)
        for where in ("before the communication", "after the communication")
    }


def _run(world: World, where: str) -> dict[str, Any]:
    job = language_job(data=examples(24), batch=4, steps=6)
    plan = Plan([Autocast(dtype="fp16", growth_interval=2), DDP()])
    setup = prepare(job, plan, job_context(job, world=world))
    held: list[Session] = []
    mine = world.rank == world.size - 1

    def now() -> bool:
        return mine and held[0].progress.step in OVERFLOWS

    def attempt(engine: Any, batch: Any) -> Any:
        found = run_once(engine, batch)
        if where == "after the communication" and now():
            setup.precision.parameters()[0].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        return found

    setup.run_passes = attempt
    session = assemble(setup)
    held.append(session)
    if where == "before the communication":
        model: Any = session.model
        model.lm_head.weight.register_hook(lambda g: g * torch.inf if now() else g)
    scale: Any = setup.loss_scale
    steps = [(m.skipped, scale.value) for m in training(session)]
    weights = torch.cat([p.detach().flatten() for p in session.finish().parameters()])
    return {"steps": steps, "weights": float(weights.double().sum())}
