"""Small jobs for tests: real architectures at toy size, examples of uneven lengths, no
downloads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.core import state
from hasten.core.context import ExampleStats, JobContext, ModelFacts
from hasten.core.job import GlobalBatch, Job, Stop, with_language_counts
from hasten.core.plan import Plan
from hasten.core.setup import Session, prepare
from hasten.core.state import state_of
from hasten.core.step import assemble, training
from hasten.core.technique import Technique
from hasten.core.timing import StepMetrics
from hasten.machine import host
from hasten.machine.environment import World
from hasten.models.load import take_own_attention
from hasten.parts.checkpoint.chunks import CheckpointTensors, Form, Size, local_part
from hasten.parts.data.collate import TokenizedExample, padded, tokenized_example
from hasten.parts.nn.causal_lm import freeze_indexers
from hasten.parts.nn.losses import WholeLogitsLoss
from hasten.parts.optim.weight_average import decayed_groups

VOCABULARY = 97
# Settings of another trainer: nothing is reported or saved.
SILENT: dict[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
ARCHITECTURES = ("llama", "qwen2", "deepseek_v2", "deepseek_v3")
NEWER = ("deepseek_v32", "deepseek_v4")  # what Transformers has had of DeepSeek since
# Many heads: keys of equal score, among which nobody says which is chosen, would be common else.
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}
V4 = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,  # the first three look their experts up
    "sliding_window": 8,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "max_position_embeddings": 128,
    "partial_rotary_factor": 0.5,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 4,
}


def logits(model: Any) -> Tensor:
    """Of the same 24 tokens each time, (2, 12, vocabulary), in evaluation mode."""
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(24).view(2, 12)).logits
    return found


def tiny_config(architecture: str) -> Any:
    import transformers as hf

    if architecture == "llama":
        return hf.LlamaConfig(**COMMON, num_key_value_heads=4)
    if architecture == "qwen2":
        return hf.Qwen2Config(**COMMON, num_key_value_heads=2)
    if architecture == "deepseek_v2":
        return hf.DeepseekV2Config(**COMMON, **MLA, topk_method="greedy", n_group=1, topk_group=1)
    if architecture == "deepseek_v3":
        return hf.DeepseekV3Config(
            **COMMON, **{**MLA, "q_lora_rank": 16}, n_group=2, topk_group=1, norm_topk_prob=True
        )
    if architecture == "deepseek_v32":
        fields = {**MLA, **INDEXER, "q_lora_rank": 16}
        return hf.DeepseekV32Config(**COMMON, **fields, n_group=2, topk_group=1)
    if architecture == "deepseek_v4":
        return hf.DeepseekV4Config(**V4)
    raise ValueError(architecture)


def tiny_model(
    architecture: str = "llama", seed: int = 0, dtype: Any = torch.float32, *, tied: bool = False
) -> nn.Module:
    """The head of a ``tied`` one is its embedding."""
    import transformers as hf

    torch.manual_seed(seed)
    config = tiny_config(architecture)
    config.tie_word_embeddings = tied or config.tie_word_embeddings
    model = hf.AutoModelForCausalLM.from_config(config)
    take_own_attention(model)
    freeze_indexers(model)
    if dtype is torch.float64 and "deepseek" in architecture:
        model.set_experts_implementation("eager")  # the grouped product has no float64
    built: nn.Module = model.to(dtype)
    return built


def compiled_in(part: str, model: nn.Module) -> nn.Module:
    """The model; all parts of its blocks but this one have code of their own and aren't compiled.

    A compiler takes seconds for each kind of part.
    """
    for layer in cast(Any, model).model.layers:
        for name, module in layer.named_children():
            if name != part:
                module.forward = module.forward
    return model


def examples(count: int = 24, seed: int = 0, longest: int = 40) -> list[TokenizedExample]:
    """Examples of uneven lengths with uneven loss masks, each with at least one trained token."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(draw.integers(3, longest + 1))
        trained = draw.random(length) < 0.6
        trained[-1] = True
        found.append(tokenized_example(draw.integers(3, VOCABULARY, length), trained))
    return found


def language_job(
    model: Callable[[], nn.Module] = tiny_model,
    *,
    data: Sequence[TokenizedExample] | None = None,
    steps: int = 3,
    batch: int = 8,
    lr: float = 1e-2,
    optimizer: Any = torch.optim.AdamW,
    **changes: Any,
) -> Job:
    data = examples() if data is None else data
    settings: dict[str, Any] = {
        "model": model,
        "loss": WholeLogitsLoss,
        "optimizer": lambda named: optimizer(decayed_groups(named, 0.0), lr=lr),
        "stop": Stop(steps=steps),
        "examples": data,
        "lengths": [r.length for r in data],
        "collate": with_language_counts(padded),
        "batch": GlobalBatch(examples=batch),
        "eval_data": examples(6, seed=9),
        "seed": 3,
    }
    return Job(**{**settings, **changes})


def job_context(job: Job, architecture: str = "llama", world: World | None = None) -> JobContext:
    lengths = [int(n) for n in job.lengths]
    return JobContext(
        hardware=host.hardware(),
        world=world or World(),
        model=ModelFacts(
            *(architecture, 50_000, 32, 2, VOCABULARY),
            experts=MLA["n_routed_experts"] if "deepseek_v" in architecture else 0,
            head_reason="",
        ),
        examples=ExampleStats(len(lengths), sum(lengths), max(lengths, default=0), 0.6),
    )


def able(context: JobContext) -> JobContext:
    """The same on a processor that has bf16 products, whatever this one has."""
    sets = ("avx2", "avx512f", "avx512_bf16")
    return replace(context, hardware=replace(context.hardware, instruction_sets=sets))


def session_of(
    job: Job,
    *techniques: Technique,
    architecture: str = "llama",
    folder: Any = None,
    world: World | None = None,
) -> Session:
    context = job_context(job, architecture, world)
    return assemble(prepare(job, Plan(techniques), context, folder))


class InMemory(CheckpointTensors):
    """A state in memory, as if it had been written and read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.forms = {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def part(self, name: str, offset: Size, sizes: Size) -> torch.Tensor:
        window = tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
        own = local_part(self._tensors[name])
        return (own.flatten() if len(window) != own.ndim else own)[window]  # flat: DeepSpeed's


def restore(session: Session, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Loads a state that was saved, or is in memory."""
    saved = tensors if isinstance(tensors, CheckpointTensors) else InMemory(tensors)
    state.restore(session, saved, meta)


def state_of_all_ranks(session: Session) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What all ranks save together, on each rank, as if it had been written and read."""
    tensors, meta = state_of(session)
    detached = {n: t.detach() for n, t in tensors.items()}
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in detached.items()}
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, copy.deepcopy((full, meta)))
    tensors = {n: t for tensors, _ in reversed(rows) for n, t in tensors.items()}
    return tensors, {**rows[0][1], "ranks": [meta["ranks"][0] for _, meta in rows]}


def run(session: Session) -> list[StepMetrics]:
    return list(training(session))
