"""Fused layers on several ranks, for ``ranks.on_ranks``."""

from __future__ import annotations

from typing import Any

import torch

from hasten.core.job import Stop
from hasten.core.plan import Plan
from hasten.core.session import assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.techniques.collate import Packed
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.ddp import DDP
from tiny import examples, job_context, language_job, tiny_model

CASES = {"llama": torch.float32, "deepseek_v3": torch.float32, "qwen2": torch.bfloat16}


def train_fused(world: World) -> dict[str, Any]:
    """Losses of every case, and whether the layers say that they are fused."""
    found = {}
    for architecture, dtype in CASES.items():
        job = language_job(
            lambda a=architecture, d=dtype: tiny_model(a, dtype=d),
            data=examples(9),
            batch=4,
            stop=Stop(epochs=2),
            lr=1e-3,
        )
        techniques = (Packed(), FusedLayers(), *((DDP(),) if world.size > 1 else ()))
        context = job_context(job, architecture, world)
        session = assemble(prepare(job, Plan(techniques), context))
        losses = [m.loss for m in training(session)]
        found[architecture] = {
            "losses": losses,
            "effective": FusedLayers().check_effect(session).effective,
        }
    return found
