#!/usr/bin/env bash
# peft: it warns that its own rank_pattern was ignored, and applies it.
#
# gate_proj, up_proj and down_proj of a mixture of experts become the fused experts, and gate_up_proj
# gets twice the rank by a rank_pattern of PEFT's own. A warning states that this pattern matched
# nothing and was ignored. It wasn't: the adapter has twice the rank.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

RANK = 2
sizes = dict(
    vocab_size=64, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1, head_dim=8,
    num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
names = ["gate_proj", "up_proj", "down_proj"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules=names)
    adapted = peft.get_peft_model(model, config)
said = [str(w.message) for w in caught if "rank_pattern" in str(w.message)]
ranks = {
    layer.parameter_name: layer.r["default"]
    for layer in adapted.modules()
    if type(layer).__name__ == "ParamWrapper"
}
print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
print(f"r={RANK}, target_modules={names}; the user gave no rank_pattern")
print(f"warning: {said}")
print(f"ranks of the adapters: {ranks}")
ignored = any("were ignored" in sentence for sentence in said)
if not ignored or ranks != {"gate_up_proj": 2 * RANK, "down_proj": RANK}:
    sys.exit("the behaviour has changed")
PYTHON
