"""The numbers of the DeepSeek family: one mapping of transformers config fields per model size.

The published sizes repeat the ``config.json`` files on the hub. The small relatives keep each
architecture's proportions: grouped heads stay grouped, latent attention keeps its low ranks and its
split of plain and rotary dimensions, a mixture of experts keeps groups, shared experts, a dense
first layer and as much active as dense width. They are trained from scratch, so their positions are
plain rotary ones; the published YaRN stretch is a later stage of a model's life.
"""

from __future__ import annotations

from typing import Any, Final

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
