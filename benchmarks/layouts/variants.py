"""The variants of bench_layouts.py: layouts on so many ranks, each on a model that it can cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hasten.core.context import ExampleStats, JobContext, ModelFacts
from hasten.core.job import GlobalBatch, Job, Stop, with_language_counts
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare, unsupported_reasons
from hasten.core.step import assemble
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine import host
from hasten.machine.environment import World
from hasten.parts.data.collate import padded, tokenized_example
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.optim.weight_average import decayed_groups
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.experts import ExpertParallel
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel

DENSE, EXPERTS = "llama", "deepseek_v3"
VOCABULARY = 1024
ENDLESS = 10**9  # steps; a turn takes as many as it wants
SHAPES: dict[str, dict[str, int]] = {  # of the model, by the size asked for
    "7M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
}
HEADS = 4


@dataclass(frozen=True)
class Variant:
    """``layout`` None: each process trains the model by itself, and nothing travels."""

    model: str
    layout: Technique | None = None


@dataclass(frozen=True)
class Load:
    """What a process has to do in a step: ``examples`` of ``tokens`` each, under any layout."""

    size: str = "7M"
    examples: int = 4
    tokens: int = 128


def variants(world: int) -> dict[str, Variant]:
    """Every layout that ``world`` ranks allow; a step's examples are ``world`` times a
    process's.
    """
    found = {
        "ddp": Variant(DENSE, DDP()),
        "fsdp2": Variant(DENSE, FSDP2()),
        "tensor_parallel": Variant(DENSE, TensorParallel()),
        "pipeline 1f1b": Variant(DENSE, Pipeline(micro_batch_size=2)),
        "pipeline zero_bubble": Variant(
            DENSE, Pipeline(micro_batch_size=2, schedule="zero_bubble")
        ),
        "ddp of experts": Variant(EXPERTS, DDP()),
        "expert_parallel": Variant(EXPERTS, ExpertParallel()),
    }
    if world == 4:
        found |= {
            "dp 2 x shard 2": Variant(DENSE, FSDP2(replicas=2)),
            "dp 2 x tp 2": Variant(DENSE, Hybrid(dp=2, tp=2)),
            "shard 2 x tp 2": Variant(DENSE, Hybrid(shard=2, tp=2)),
            "dp 2 x pp 2": Variant(DENSE, Pipeline(stages=2, micro_batch_size=2)),
            "shard 2 x pp 2": Variant(DENSE, Hybrid(shard=2, pp=2)),
            "pp 2 x tp 2": Variant(DENSE, Hybrid(pp=2, tp=2)),
            "dp 4 x ep 2": Variant(EXPERTS, ExpertParallel(size=2)),
            "shard 4 x ep 2": Variant(EXPERTS, Hybrid(shard=4, ep=2)),
        }
    return found


def model(kind: str, size: str) -> nn.Module:
    import transformers as hf

    shape = {**SHAPES[size], "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config: Any
    if kind == DENSE:
        config = hf.LlamaConfig(**shape, num_attention_heads=HEADS, num_key_value_heads=HEADS)
    else:
        each = shape["hidden_size"] // HEADS
        config = hf.DeepseekV3Config(
            **{**shape, "num_hidden_layers": 4},
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            q_lora_rank=None,
            kv_lora_rank=each,
            v_head_dim=each,
            qk_nope_head_dim=each // 2,
            qk_rope_head_dim=each // 2,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=shape["intermediate_size"] // 4,  # rows of 16 bytes and more
        )
    built: Any = hf.AutoModelForCausalLM.from_config(config)
    built.set_attn_implementation("sdpa")
    made: nn.Module = built
    return made


def session(variant: Variant, load: Load, world: World) -> Session:
    """A run that never ends; ``world`` is this process's own where the variant has no layout.

    Raises:
        InputError: the layout can't work here.
    """
    ranks = world.size if variant.layout is not None else 1
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (16 * ranks * load.examples, load.tokens), generator=draw)
    examples = [tokenized_example(row.numpy(), [True] * load.tokens) for row in rows]
    job = Job(
        model=lambda: model(variant.model, load.size),
        loss=WholeLogitsLoss,
        optimizer=lambda named: torch.optim.AdamW(decayed_groups(named, 0.1), lr=1e-4, fused=True),
        stop=Stop(steps=ENDLESS),
        collate=with_language_counts(padded),
        examples=examples,
        lengths=[load.tokens] * len(examples),
        batch=GlobalBatch(examples=ranks * load.examples),
    )
    context = _facts(variant, load, world, len(examples))
    plan = Plan([variant.layout] if variant.layout is not None else [])
    if reasons := unsupported_reasons(plan, context):
        raise InputError(reasons[0])
    return assemble(prepare(job, plan, context))


def _facts(variant: Variant, load: Load, world: World, examples: int) -> JobContext:
    shape = SHAPES[load.size]
    layers = shape["num_hidden_layers"] if variant.model == DENSE else 4
    about = ModelFacts(
        *(variant.model, 0, shape["hidden_size"], layers, VOCABULARY),
        experts=8 if variant.model == EXPERTS else 0,
        heads=HEADS,
        key_value_heads=HEADS,
        head_reason="",  # of Llama and Qwen3: head and cross-entropy, no more
    )
    return JobContext(
        hardware=host.hardware(),
        world=world,
        model=about,
        examples=ExampleStats(examples, examples * load.tokens, load.tokens),
    )
