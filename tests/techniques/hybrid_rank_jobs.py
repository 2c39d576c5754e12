"""Stages in pieces, and experts beside shards: each case is run by one process too."""

from __future__ import annotations

from typing import Any

import torch

from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.compress import Half
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import FusedAdamW
from hasten.techniques.precision import BF16MasterWeights
from hasten.techniques.routing import BalancedRouting
from techniques.sharded_rank_jobs import Case, outcome

TWO = GradientAccumulation(micro_batch_size=2)
BALANCED = BalancedRouting(speed=0.01, sequence_loss=0.05)
SHARDS, CUT = Hybrid(pp=2, shard=2), Hybrid(pp=2, tp=2)
EXPERTS = Hybrid(shard=4, ep=2)
CASES: dict[str, Case] = {
    "stages of shards": Case(SHARDS, (TWO,)),
    "stages of shards, tied, recomputed": Case(
        SHARDS, (ActivationCheckpointing(), LabelledTokenLoss(chunk=16)), tied=True
    ),
    "stages of shards, experts": Case(SHARDS, (BALANCED,), "deepseek_v3"),
    "stages of cut layers": Case(CUT, (TWO,), "qwen2"),
    "stages of cut layers, tied": Case(CUT, (LabelledTokenLoss(chunk=16),), tied=True),
    "stages of cut layers, experts": Case(
        CUT, (BALANCED, ActivationCheckpointing()), "deepseek_v3"
    ),
    "experts beside shards": Case(EXPERTS, (BALANCED, TWO), "deepseek_v3"),
    "experts beside shards, whole gradients": Case(
        Hybrid(shard=4, ep=4, whole_gradients=True, reshard=False), (TWO,), "deepseek_v2"
    ),
    "experts beside copies of shards": Case(
        Hybrid(dp=2, shard=2, ep=2),
        (ActivationCheckpointing(), FusedAdamW()),
        "deepseek_v3",
        torch.float32,
    ),
}
REFUSED: dict[str, tuple[Hybrid, tuple[Technique, ...]]] = {
    "masters of stages": (SHARDS, (BF16MasterWeights(),)),
    "masters beside experts": (EXPERTS, (BF16MasterWeights(),)),
    "a communication method between stages": (CUT, (Half(),)),
    "a communication method beside experts": (EXPERTS, (Half(),)),
    "activation_checkpointing's own choice": (EXPERTS, (ActivationCheckpointing(budget=0.5),)),
}


def on_four(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {name: outcome(case.session(world)) for name, case in CASES.items()}
    for name, (layout, others) in REFUSED.items():
        experts = "deepseek_v3" if layout.ep > 1 else "llama"
        try:
            Case(layout, others, experts, torch.float32).session(world)
        except InputError as error:
            found[name] = str(error)
    return found
