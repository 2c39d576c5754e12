"""A profile that tests run on several ranks; plain JSON values."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.measure.profile import efficiency_once_more, measure
from hasten.techniques.batch import AdaptiveBatch
from hasten.techniques.communication.compress import TopK
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.routing import BalancedRouting
from tiny import job_context, language_job, tiny_model

PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "the articles'": (TopK(dense_share=0.0), AdaptiveBatch(initial_size=2)),
    "routed": (BalancedRouting(speed=0.1),),
}


def profiled(world: World) -> dict[str, Any]:
    """The profile of a replicated toy job, and what each rank wrote."""
    job = language_job(steps=50)
    session = assemble(prepare(job, Plan((DDP(),)), job_context(job, world=world)))
    with tempfile.TemporaryDirectory() as place:
        found = measure(session, 1, 3, Path(place))
        found["written"] = sorted(path.name for path in Path(place).iterdir())
    return found


def efficiencies(world: World) -> dict[str, Any]:
    """Of each plan: its efficiency, and whether weights and biases are afterwards as before."""
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        architecture = "deepseek_v3" if name == "routed" else "llama"
        job = language_job(partial(tiny_model, architecture), steps=6)
        context = job_context(job, architecture, world=world)
        session = assemble(prepare(job, Plan((*plan, DDP())), context))
        run: Any = training(session)
        next(run)
        before = replace(session.progress)
        turn = [next(run), next(run)]
        run.close()
        kept = {key: t.clone() for key, t in session.loss_module.state_dict().items()}
        value = efficiency_once_more(session, before, turn)
        after = session.loss_module.state_dict()
        same = all(torch.equal(kept[key], after[key]) for key in kept)
        found[name] = {"value": value, "same": same, "steps": session.progress.step}
    return found
