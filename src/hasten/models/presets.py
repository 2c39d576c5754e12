"""The DeepSeek family as data: published sizes and small relatives, buildable without a download.

A preset is a model's ``config.json`` under a name, without weights and without a tokenizer. The
published ones carry the numbers of the files on the hub; ``-tiny`` and ``-small`` have the same
architecture at a size that a processor trains in minutes (the numbers stand first). Importing
this module costs nothing: transformers comes in when a config is built.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hasten.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# The numbers of the DeepSeek family: one mapping of transformers config fields per model size.
#
# The published sizes repeat the ``config.json`` files on the hub. The small relatives keep each
# architecture's proportions: grouped heads stay grouped, latent attention keeps its low ranks and
# its split of plain and rotary dimensions, a mixture of experts keeps groups, shared experts, a
# dense first layer and as much active as dense width. They are trained from scratch, so their
# positions are plain rotary ones; the published YaRN stretch is a later stage of a model's life.

# Presets.

Fields = dict[str, Any]

_PLAIN_ROPE: Final[Fields] = {"rope_type": "default", "rope_theta": 10000.0}
# Trained at 4,096 positions, then stretched 40-fold; V2-Lite and V3 differ in mscale alone.
_YARN: Final[Fields] = _PLAIN_ROPE | {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_COMMON: Final[Fields] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_parameters": _PLAIN_ROPE,
}
# Without a tokenizer's word the small presets have the embedded corpus' vocabulary and no ids.
_SMALL: Final[Fields] = _COMMON | {
    "vocab_size": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 4096,
}

LLM_7B: Final[Fields] = _COMMON | {
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 4096,
    "hidden_size": 4096,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "attention_bias": False,
}
LLM_1B: Final[Fields] = LLM_7B | {
    "hidden_size": 1792,
    "num_hidden_layers": 16,
    "num_attention_heads": 14,
    "num_key_value_heads": 14,
    "intermediate_size": 4864,
}
LLM_SMALL: Final[Fields] = _SMALL | {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1376,
}
LLM_TINY: Final[Fields] = LLM_SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
}

QWEN_1_5B: Final[Fields] = _COMMON | {
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "max_position_embeddings": 131072,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "use_sliding_window": False,
}
QWEN_7B: Final[Fields] = QWEN_1_5B | {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
}
QWEN_SMALL: Final[Fields] = _SMALL | {  # a quarter of the 1.5 B width
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 2240,
    "use_sliding_window": False,
}
QWEN_TINY: Final[Fields] = QWEN_SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1472,
}

V2_LITE: Final[Fields] = _COMMON | {
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 163840,
    "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V2_LITE_SMALL: Final[Fields] = (
    V2_LITE
    | _SMALL
    | {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 768,
        "n_routed_experts": 32,
        "moe_intermediate_size": 96,
    }
)
V2_LITE_TINY: Final[Fields] = V2_LITE_SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 576,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}

V3: Final[Fields] = _COMMON | {
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 163840,
    "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
V3_SMALL: Final[Fields] = (
    V3
    | _SMALL
    | {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 480,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "num_nextn_predict_layers": 0,
    }
)
V3_TINY: Final[Fields] = V3_SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
}


@dataclass(frozen=True)
class Preset:
    """One model's shape: its transformers ``model_type`` and the fields of its config."""

    name: str
    architecture: str  # transformers' model_type: llama, qwen2, deepseek_v2, deepseek_v3
    config: Mapping[str, Any] = field(hash=False, repr=False)
    description: str
    source: str  # where the numbers are from


def preset(name: str) -> Preset:
    """The preset of that name; an unknown name is an InputError with the nearest ones."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(PRESETS)}"
    raise InputError(f"there is no preset named {name!r}: {advice}")


def build_config(
    preset: Preset,
    *,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedConfig:
    """A fresh transformers config of the preset, fitted to a tokenizer by ``with_vocabulary``."""
    from transformers import CONFIG_MAPPING

    fields = copy.deepcopy(dict(preset.config))
    config = CONFIG_MAPPING[preset.architecture](**fields)
    return with_vocabulary(
        config,
        vocab_size=vocab_size,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )


def with_vocabulary(
    config: PreTrainedConfig,
    *,
    vocab_size: int | None,
    bos_token_id: int | None,
    eos_token_id: int | None,
    pad_token_id: int | None,
) -> PreTrainedConfig:
    """The same config, changed in place, with the vocabulary and token ids of a tokenizer.

    None keeps what the config says, except that another vocabulary size also forgets the config's
    own token ids: they number another tokenizer's tokens. Raises InputError for an id outside the
    vocabulary.
    """
    given = {"bos": bos_token_id, "eos": eos_token_id, "pad": pad_token_id}
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"a vocabulary of {vocab_size} tokens can't be trained: give at least 1")
    replaced = vocab_size is not None and vocab_size != config.vocab_size
    if replaced:
        config.vocab_size = vocab_size
    for token, token_id in given.items():
        if token_id is not None and not 0 <= token_id < config.vocab_size:
            raise InputError(
                f"{token}_token_id {token_id} lies outside the vocabulary of {config.vocab_size} "
                "tokens: give the ids of the tokenizer that the model is trained with"
            )
        if token_id is not None or replaced:
            setattr(config, f"{token}_token_id", token_id)
    return config


_SCALED_DOWN: Final = "the published model's proportions, scaled down for this package"

_ALL: Final = (
    Preset(
        "deepseek-llm-7b",
        "llama",
        LLM_7B,
        "dense; 6.9 B parameters",
        "config.json of deepseek-ai/deepseek-llm-7b-base",
    ),
    Preset(
        "deepseek-llm-1b",
        "llama",
        LLM_1B,
        "dense; 1.0 B parameters, a stand-in for one GPU",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-llm-small",
        "llama",
        LLM_SMALL,
        "dense; 19.0 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-llm-tiny",
        "llama",
        LLM_TINY,
        "dense; 3.2 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-r1-distill-qwen-7b",
        "qwen2",
        QWEN_7B,
        "dense, grouped heads; 7.6 B parameters",
        "config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    ),
    Preset(
        "deepseek-r1-distill-qwen-1.5b",
        "qwen2",
        QWEN_1_5B,
        "dense, grouped heads; 1.8 B parameters",
        "config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    Preset(
        "r1-distill-qwen-small",
        "qwen2",
        QWEN_SMALL,
        "dense, grouped heads; 17.6 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "r1-distill-qwen-tiny",
        "qwen2",
        QWEN_TINY,
        "dense, grouped heads; 5.2 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-v2-lite",
        "deepseek_v2",
        V2_LITE,
        "latent attention, experts; 15.7 B parameters",
        "config.json of deepseek-ai/DeepSeek-V2-Lite; arXiv 2405.04434",
    ),
    Preset(
        "v2-lite-small",
        "deepseek_v2",
        V2_LITE_SMALL,
        "latent attention, experts; 22.7 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "v2-lite-tiny",
        "deepseek_v2",
        V2_LITE_TINY,
        "latent attention, experts; 5.3 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "deepseek-v3",
        "deepseek_v3",
        V3,
        "latent attention, experts in groups; 671 B parameters",
        "config.json of deepseek-ai/DeepSeek-V3; arXiv 2412.19437",
    ),
    Preset(
        "v3-small",
        "deepseek_v3",
        V3_SMALL,
        "latent attention, experts in groups; 21.3 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
    Preset(
        "v3-tiny",
        "deepseek_v3",
        V3_TINY,
        "latent attention, experts in groups; 4.7 M parameters beside the embeddings",
        _SCALED_DOWN,
    ),
)
PRESETS: Final[Mapping[str, Preset]] = {entry.name: entry for entry in _ALL}
