"""Models that one rank of a host builds, and what the others are sent; plain JSON values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hasten.core.plan import Plan
from hasten.core.session import Session, assemble
from hasten.core.setup import prepare
from hasten.core.step import training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.parts.distributed import weight_broadcast
from hasten.parts.distributed.weight_broadcast import WeightBroadcast
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.layers import FusedLayers
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.precision import BF16MasterWeights
from tiny import examples, job_context, language_job, tiny_model

CASES: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "plain": ("llama", (GradientAccumulation(micro_batch_size=2),)),
    "tied": ("tied", (LabelledTokenLoss(chunk=16),)),
    "experts": ("deepseek_v3", (LabelledTokenLoss(chunk=16), ActivationCheckpointing())),
    "older latents": ("deepseek_v2", ()),
    "adapters": ("llama", (LoRA(rank=4), FusedLayers())),
    "half a format": ("qwen2", (BF16MasterWeights(),)),
}


def built(architecture: str) -> nn.Module:
    model: Any = tiny_model("llama" if architecture == "tied" else architecture)
    if architecture == "tied":
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    found: nn.Module = model
    return found


@dataclass(frozen=True)
class Factory:
    architecture: str

    def __call__(self) -> nn.Module:
        return built(self.architecture)

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return built(self.architecture)


def session(world: World, name: str, once: bool) -> Session:
    architecture, techniques = CASES[name]
    known = "llama" if architecture == "tied" else architecture
    job = language_job(Factory(architecture), data=examples(9), batch=4, steps=4)
    plan = Plan((*techniques, FSDP2(build_once=once)))
    return assemble(prepare(job, plan, job_context(job, known, world)))


def train(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CASES:
        here = {once: session(world, name, once) for once in (True, False)}
        began = {once: _weights(s) for once, s in here.items()}
        found[name] = {
            "sent": here[True].setup.layout.arrived_bytes,  # type: ignore[attr-defined]
            "model": sum(p.numel() for p in built(CASES[name][0]).parameters()),
            "built": here[True].setup.layout.builds,  # type: ignore[attr-defined]
            "alike": began[True] == began[False],
            "meta": any(t.is_meta for t in here[True].module.state_dict().values()),
            "losses": [[m.loss for m in training(s)] for s in here.values()],
        }
    found["wrong"] = wrong(world)
    return found


def _weights(found: Session) -> dict[str, list[float]]:
    """Of each piece and each buffer two numbers, by name."""
    pieces = found.setup.precision.parameters()
    tensors = {str(place): piece for place, piece in enumerate(pieces)}
    tensors |= dict(found.module.named_buffers())
    wide = {name: t.detach().double() for name, t in tensors.items()}
    return {name: [float(t.sum()), float(t.square().sum())] for name, t in wide.items()}


def wrong(world: World) -> str:
    """Rank 1 has the skeleton of another model."""
    mine = nn.Linear(3, 3) if world.is_main else nn.Linear(3, 4, device="meta")
    try:
        WeightBroadcast(world.is_main)(mine)
    except ValueError as error:
        return str(error)
    return ""


def on_hosts(world: World) -> dict[str, Any]:
    """Four ranks of two faked hosts; on the second nobody has the model."""
    weight_broadcast.host_name = lambda: f"host-{world.rank // 2}"
    found: dict[str, Any] = {}
    for name, readers in (("each", (0, 2)), ("first", (0,))):
        reads = world.rank in readers
        torch.manual_seed(world.rank)
        module = nn.Linear(5, 3, device="cpu" if reads else "meta")
        came = WeightBroadcast(reads)
        came(module)
        rows: list[Any] = [None] * world.size
        dist.all_gather_object(rows, module.weight.detach().flatten().tolist())
        found[name] = {"equal": [rows[world.rank] == row for row in rows], "sent": came.sent_bytes}
    return found
