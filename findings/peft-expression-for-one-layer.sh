#!/usr/bin/env bash
# peft: an expression for one layer adapts all layers of a mixture of experts.
#
# target_modules="model\.layers\.0\.self_attn\.o_proj" adapts that projection in every layer of a
# mixture-of-experts model of transformers 5, without a message; in a dense model in the one layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import peft
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

EXPRESSION = r"model\.layers\.0\.self_attn\.o_proj"
SIZES = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=2, num_key_value_heads=2,
)
LATENT = dict(
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)


def adapted(model):
    """Numbers of the layers with an adapter."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=EXPRESSION)
    names = [n for n, p in peft.get_peft_model(model, config).named_parameters() if "lora_A" in n]
    return [int(name.split("layers.")[1].split(".")[0]) for name in names]


dense = adapted(LlamaForCausalLM(LlamaConfig(**SIZES)))
experts = adapted(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT)))
print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
print(f"target_modules={EXPRESSION!r}")
print(f"Llama with 3 layers:       adapters in layers {dense}")
print(f"DeepSeek-V3 with 3 layers: adapters in layers {experts}")
if (dense, experts) != ([0], [0, 1, 2]):
    sys.exit("the behaviour has changed")
PYTHON
