"""The rows of benchmarks/results/gpu.md as data: shape, load, the ways to fit it, and the goal.

Shapes repeat the published ``config.json`` of each model; the weights are random. A row lists its
choices in the order in which they are tried: the first that fits the device's memory by simulation
is run, and where memory runs out after all, the next.

A full 8 B with float32 masters fits an H200 (141 GB) once its moments have 8 bits. An H100 (80 GB)
takes weights in bf16 alone; its optimizer rounds them at random, so that small updates count in the
mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.core.technique import Technique
from hasten.techniques.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.adapter import LoRA
from hasten.techniques.attention import DocumentAttention
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.collate import Packed
from hasten.techniques.experts import ExpertsImplementation
from hasten.techniques.layers import FusedLayers
from hasten.techniques.loss import LabelledTokenLoss
from hasten.techniques.optimizer import CompactAdamW, FusedAdamW
from hasten.techniques.precision import Autocast, BF16MasterWeights, Float8

Shape = Mapping[str, Any]

_COMMON: Shape = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
LLAMA_3_8B: Shape = {
    **_COMMON,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
QWEN_2_5_7B: Shape = {
    **_COMMON,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
ONE_BILLION: Shape = {  # deepseek-llm-1b of the presets
    **_COMMON,
    "hidden_size": 1792,
    "intermediate_size": 4864,
    "num_hidden_layers": 16,
    "num_attention_heads": 14,
    "num_key_value_heads": 14,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
DEEPSEEK_V2_LITE: Shape = {
    **_COMMON,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
SMALL: Shape = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}

ROWS_OF_TOKENS = (Packed(), DocumentAttention(), FusedLayers(), LabelledTokenLoss())
MASTERS = (*ROWS_OF_TOKENS, BF16MasterWeights())


@dataclass(frozen=True)
class Choice:
    """One way to run a row: techniques, examples of a micro-batch, format the model is given in."""

    plan: tuple[Technique, ...]
    examples: int
    weights: str = "bfloat16"

    def techniques(self, batch: int) -> tuple[Technique, ...]:
        """The whole plan, where a step has ``batch`` examples."""
        cut = (
            (GradientAccumulation(micro_batch_size=self.examples),) if self.examples < batch else ()
        )
        return (*self.plan, *cut)


@dataclass(frozen=True)
class Row:
    """One line of the page. ``lengths``: of all examples, or the longest and uneven ones below."""

    name: str
    what: str
    architecture: str
    shape: Shape
    length: int
    batch: int  # examples of a step
    variants: Mapping[str, tuple[Choice, ...]]
    goals: tuple[float, float, float] | None = None  # tokens/s on one H200: must, target, stretch
    uneven: bool = False
    peers: tuple[str, ...] = ()  # other trainers, in the same turns
    ratio_goal: float | None = None  # to the first of them
    needs_gpu: bool = True

    @property
    def layers(self) -> int:
        found: int = self.shape["num_hidden_layers"]
        return found


def _sizes(plan: tuple[Technique, ...], *examples: int, weights: str = "bfloat16") -> list[Choice]:
    return [Choice(plan, size, weights) for size in examples]


_LORA = (LoRA(rank=16, targets="all-linear"), *MASTERS)
_SMALL_MOMENTS = CompactAdamW(moments="int8")
_FLOAT8 = (*ROWS_OF_TOKENS, Float8(), _SMALL_MOMENTS)

_LORA_EXPERTS = (*_LORA, ExpertsImplementation(kind="fused"))
_EXPERTS_CHOICES = (
    *_sizes(_LORA_EXPERTS, 4, 2, 1),
    *_sizes((*_LORA_EXPERTS, ActivationCheckpointing()), 2, 1),
)
_LORA_CHOICES = (
    *_sizes(_LORA, 4, 2, 1),
    *_sizes((*_LORA, ActivationCheckpointing()), 4, 2, 1),
)
_FULL_CHOICES = (
    *_sizes((*MASTERS, _SMALL_MOMENTS), 1),
    *_sizes((*MASTERS, _SMALL_MOMENTS, ActivationCheckpointing(budget=0.5)), 1),
    *_sizes((*MASTERS, _SMALL_MOMENTS, ActivationCheckpointing()), 4, 2, 1),
    *_sizes((*ROWS_OF_TOKENS, _SMALL_MOMENTS), 1),
    *_sizes((*ROWS_OF_TOKENS, _SMALL_MOMENTS, ActivationCheckpointing()), 4, 2, 1),
)
_FLOAT8_CHOICES = (
    *_sizes((*_FLOAT8, ActivationCheckpointing()), 2, 1, weights="float32"),
    *_sizes((*_FLOAT8, ActivationCheckpointing()), 2, 1),
)
_PLAIN = (Autocast(),)
_MASTERS_ANYWHERE = (*ROWS_OF_TOKENS, BF16MasterWeights(emulate=True))

ROWS: tuple[Row, ...] = (  # by priority
    Row(
        "lora-llama-3-8b",
        "LoRA (rank 16, all linear layers), bf16, rows of 4,096",
        "llama",
        LLAMA_3_8B,
        4096,
        8,
        {"hasten": _LORA_CHOICES},
        goals=(12_500, 14_000, 16_000),
    ),
    Row(
        "full-8b-bf16",
        "all weights, bf16, rows of 4,096",
        "llama",
        LLAMA_3_8B,
        4096,
        8,
        {"hasten": _FULL_CHOICES},
        goals=(8_200, 9_200, 10_300),
    ),
    Row(
        "lora-qwen-2.5-7b",
        "LoRA (rank 16, all linear layers), bf16, rows of 4,096",
        "qwen2",
        QWEN_2_5_7B,
        4096,
        8,
        {"hasten": _LORA_CHOICES},
        goals=(14_100, 15_800, 17_500),
    ),
    Row(
        "lora-v2-lite",
        "LoRA on DeepSeek-V2-Lite, a mixture of experts, rows of 4,096",
        "deepseek_v2",
        DEEPSEEK_V2_LITE,
        4096,
        8,
        {"hasten": _EXPERTS_CHOICES},
        goals=(22_000, 25_000, 28_000),
    ),
    Row(
        "full-8b-fp8",
        "all weights, float8 products, rows of 8,192",
        "llama",
        LLAMA_3_8B,
        8192,
        4,
        {"hasten": _FLOAT8_CHOICES},
        goals=(10_900, 12_000, 14_400),
    ),
    Row(
        "trainer-1b",
        "all weights, uneven examples up to 1,024 tokens, 16 a step, beside Transformers' Trainer",
        "llama",
        ONE_BILLION,
        1024,
        16,
        {"hasten": tuple(_sizes((*MASTERS, FusedAdamW()), 16, 8))},
        uneven=True,
        peers=("hf_trainer", "hf_trainer_liger"),
        ratio_goal=1.5,
    ),
    Row(
        "smoke",
        "a toy model of two blocks, on whatever is there, to try this script",
        "llama",
        SMALL,
        48,
        4,
        {
            "plain": tuple(_sizes((Autocast(emulate=True),), 4, weights="float32")),
            "hasten": tuple(_sizes(_MASTERS_ANYWHERE, 2, weights="float32")),
        },
        uneven=True,
        peers=("hf_trainer",),
        needs_gpu=False,
    ),
)
KERNELS = "kernels"  # no row of speed: each kernel against float64
TESTS = "gpu-tests"  # nor this: the tests marked gpu
NAMES = (KERNELS, *(row.name for row in ROWS), TESTS)


def row_named(name: str) -> Row:
    """The row of that name; a name that isn't one ends the script with those that are."""
    for row in ROWS:
        if row.name == name:
            return row
    raise SystemExit(f"there is no row {name!r}; the rows are {', '.join(NAMES)}")
