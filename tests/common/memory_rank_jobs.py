"""A model large enough for its state to dwarf small tensors, measured and estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hasten.core.plan import Plan
from hasten.core.setup import prepare
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.machine.environment import World
from hasten.measure.profile import memory_of
from hasten.models.flops import model_flops
from hasten.models.memory import ModelSize
from hasten.recipe.memory_check import largest_micro_batch, needs_of
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.optimizer import CompactAdamW
from hasten.techniques.precision import BF16MasterWeights
from tiny import examples, job_context, language_job, tiny_config

WIDTH, LAYERS, VOCABULARY = 128, 3, 1000
ON_RANKS: dict[str, tuple[Technique, ...]] = {
    "ddp": (DDP(),),
    "fsdp2": (FSDP2(),),
    "fsdp2, compact": (FSDP2(), CompactAdamW()),
    "ddp, bf16": (DDP(), BF16MasterWeights()),
    "fsdp2, half": (FSDP2(),),
}


def model(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers as hf

    config = tiny_config(architecture)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = WIDTH, 344, 64
    config.num_hidden_layers, config.vocab_size = LAYERS, VOCABULARY
    torch.manual_seed(0)
    built = hf.AutoModelForCausalLM.from_config(config)
    built.set_attn_implementation("sdpa")
    return built.to(dtype)


def both(
    architecture: str,
    techniques: tuple[Technique, ...],
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, float]:
    """Bytes by name, each estimated / measured on this rank."""
    whole = model(architecture)
    count = sum(p.numel() for p in whole.parameters())
    active = model_flops(whole).per_token / 6
    chosen = 2 if "v3" in architecture else 0
    size = ModelSize(count, active, WIDTH, LAYERS, VOCABULARY, chosen)
    job = language_job(lambda: model(architecture, dtype), data=examples(16, longest=90), steps=1)
    context = job_context(job, architecture, world)
    shape = replace(
        context.model,
        parameters=count,
        hidden_size=WIDTH,
        layers=LAYERS,
        vocabulary=VOCABULARY,
        weight_bytes=dtype.itemsize,
    )
    context = replace(context, model=shape)
    session = assemble(prepare(job, Plan(techniques), context))
    list(training(session))
    needs = needs_of(size, context, Plan(techniques), largest_micro_batch(session.setup))
    found: dict[str, Any] = memory_of(session)
    state = found["weights"] + found["gradients"] + found["optimizer"]
    return {
        "state": needs.state / state,
        "activations": needs.activations / found["activations"],
        "bytes": float(state),
    }


def on_ranks_too(world: World) -> dict[str, Any]:
    return {
        name: both("llama", plan, world, torch.bfloat16 if "half" in name else torch.float32)
        for name, plan in ON_RANKS.items()
    }
