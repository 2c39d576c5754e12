"""Recipes that are traced by simulation, and what a step of each may take.

A bound is what the code took when it was last lowered, never to be raised without a reason in
benchmarks/log.md; a goal is what the design allows. Both are of one rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.recipe.schema import Recipe, recipe_from

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu import rows  # shapes of the models that are measured on a GPU

FUSED = ("packed", "document_attention", "fused_layers", "labelled_token_loss")
MASTERS = (*FUSED, "bf16_master_weights")
SMALL_MOMENTS = {"compact_adamw": {"moments": "int8"}}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
TOY: dict[str, Any] = {
    **_NO_TOKENS,
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}
LLAMA_3_8B: dict[str, Any] = {"model_type": "llama", **rows.LLAMA_3_8B}
QWEN_2_5_7B: dict[str, Any] = {"model_type": "qwen2", **rows.QWEN_2_5_7B}
ONE_BILLION: dict[str, Any] = {"model_type": "llama", **rows.ONE_BILLION}
V2_LITE: dict[str, Any] = {"model_type": "deepseek_v2", **rows.DEEPSEEK_V2_LITE}


def simulated_recipe(folder: Path, config: dict[str, Any], **keys: Any) -> Recipe:
    """A recipe on a model of which there is only the config, in a new folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    usual = {"dataset": "stdlib", "max_steps": 10, "from_scratch": True, "output": str(folder)}
    return recipe_from({"model": str(folder), **usual, **keys}, str(folder))


def toy(folder: Path, examples: int = 2, **keys: Any) -> Recipe:
    """Two passes of ``examples`` short examples on each rank, all weights learn."""
    ranks = keys.get("nproc", 1)
    cut = {"gradient_accumulation": {"micro_batch_size": examples}}
    config = keys.pop("config", TOY)
    layers = keys.pop("layers", config["num_hidden_layers"])
    passes = keys.pop("passes", 2)
    plan = [*keys.pop("plan", MASTERS), cut]
    batch = ranks * passes * examples
    usual = {"cutoff_len": 48, "global_batch_size": batch, "plan": plan}
    return simulated_recipe(folder, {**config, "num_hidden_layers": layers}, **{**usual, **keys})


@dataclass(frozen=True)
class Budget:
    """Of a step: syncs, launches per layer and pass, the optimizer's launches, MB a token, peak."""

    syncs: int
    launches: float
    optimizer: int
    megabytes: float
    gigabytes: float


@dataclass(frozen=True)
class WholeModel:
    """A model of full size, and what it may take."""

    config: dict[str, Any]
    length: int
    examples: int  # of a pass
    plan: tuple[Any, ...]
    bound: Budget
    goal: Budget
    keys: tuple[tuple[str, Any], ...] = ()

    def recipe(self, folder: Path) -> Recipe:
        """With steps of 32,768 tokens."""
        plan = [*self.plan, {"gradient_accumulation": {"micro_batch_size": self.examples}}]
        batch = 32768 // self.length
        keys = {"cutoff_len": self.length, "global_batch_size": batch, **dict(self.keys)}
        return simulated_recipe(folder, self.config, plan=plan, **keys)


_LORA = (("finetuning_type", "lora"), ("lora_targets", "all-linear"), ("from_scratch", False))
WHOLE_MODELS = {
    "lora-llama-3-8b": WholeModel(
        *(LLAMA_3_8B, 4096, 4, MASTERS),
        *(Budget(1, 134, 12, 80, 92.1), Budget(1, 110, 12, 66, 91)),
        _LORA,
    ),
    "lora-qwen-2.5-7b": WholeModel(
        *(QWEN_2_5_7B, 4096, 4, MASTERS),
        *(Budget(1, 137, 12, 78, 91), Budget(1, 115, 12, 63, 89)),
        _LORA,
    ),
    "qlora-llama-3-8b": WholeModel(
        *(LLAMA_3_8B, 2048, 1, MASTERS),
        *(Budget(1, 143, 12, 110, 17.6), Budget(1, 115, 12, 63, 16.6)),
        (*_LORA, ("lora_base", "nf4")),
    ),
    "full-8b": WholeModel(
        *(LLAMA_3_8B, 4096, 4, (*MASTERS, SMALL_MOMENTS, "activation_checkpointing")),
        *(Budget(1, 83, 415, 66, 91), Budget(1, 80, 415, 64, 91)),
    ),
    "full-8b-fp8": WholeModel(
        *(LLAMA_3_8B, 8192, 2, (*FUSED, "float8", SMALL_MOMENTS, "activation_checkpointing")),
        *(Budget(1, 168, 415, 103, 95.3), Budget(1, 150, 415, 95, 95)),
    ),
    "full-1b": WholeModel(
        *(ONE_BILLION, 4096, 4, (*MASTERS, "fused_adamw")),
        *(Budget(1, 72, 61, 16, 33.8), Budget(1, 70, 61, 14, 33)),
    ),
    "lora-v2-lite": WholeModel(
        *(V2_LITE, 4096, 2, (*MASTERS, {"experts_implementation": {"kind": "grouped_mm"}})),
        *(Budget(1, 241, 108, 85, 65.5), Budget(1, 150, 107, 60, 60)),
        _LORA,
    ),
    "full-v2-lite": WholeModel(
        *(V2_LITE, 4096, 2),
        (
            *MASTERS,
            {"experts_implementation": {"kind": "grouped_mm"}},
            SMALL_MOMENTS,
            "activation_checkpointing",
        ),
        *(Budget(1, 257, 766, 131, 190.5), Budget(1, 190, 766, 120, 190)),
    ),
}


@dataclass(frozen=True)
class NodeLayout:
    """A layout or communication on a node of eight ranks: what joins the plan, and syncs of a
    step.
    """

    plan: tuple[Any, ...]
    bound: int
    goal: int
    config: dict[str, Any] | None = None  # of the toy, where it takes another
    passes: int = 1

    def recipe(self, folder: Path, ranks: int = 8) -> Recipe:
        return toy(
            folder,
            nproc=ranks,
            passes=self.passes,
            plan=["packed", *self.plan],
            config=self.config or TOY,
        )


_DIVIDED = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512}
DEEP: dict[str, Any] = {**TOY, **_DIVIDED, "num_hidden_layers": 8}
TOY_EXPERTS: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 500,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
}
WIDE: dict[str, Any] = {**TOY, "hidden_size": 512, "intermediate_size": 1024}  # several buckets
COMMUNICATIONS = ("half", "quantised", "top_k", "power_sgd", "local_steps", "stream")
LAYOUTS = {
    "ddp": NodeLayout(("ddp",), 1, 1),
    "fsdp2": NodeLayout(("fsdp2",), 2, 2),
    "tensor_parallel": NodeLayout(("tensor_parallel",), 2, 2, DEEP),
    "pipeline": NodeLayout(("pipeline",), 1, 1, DEEP, passes=8),
    "hybrid of pipelines": NodeLayout(({"hybrid": {"dp": 4, "pp": 2}},), 1, 1, DEEP, passes=2),
    "hybrid of shards": NodeLayout(({"hybrid": {"shard": 2, "tp": 4}},), 2, 2, DEEP),
    "expert_parallel": NodeLayout(("bf16_master_weights", "expert_parallel"), 2, 2, TOY_EXPERTS),
    **{
        f"ddp {communication}": NodeLayout(("ddp", communication), 1, 1, WIDE)
        for communication in COMMUNICATIONS
    },
    "fsdp2 quantised": NodeLayout(("fsdp2", "quantised"), 2, 2),
}
