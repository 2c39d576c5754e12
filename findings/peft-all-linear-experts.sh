#!/usr/bin/env bash
# peft: on a mixture of experts, target_modules="all-linear" leaves out dense MLP layers.
#
# Guess: every linear layer except the head gets an adapter.
# Seen: for Qwen3-MoE, names of MLP layers are translated to the fused parameters of experts.
# Attention, routed experts and the router get adapters. gate_proj, up_proj and down_proj of a
# dense layer (mlp_only_layers) get none.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  peft==0.21.2 torch==2.13.0 transformers==5.23.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
from importlib.metadata import version

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0],
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
print("peft", version("peft"), "transformers", version("transformers"))
for name, module in adapted.named_modules():
    if isinstance(module, LoraLayer):
        short = name.removeprefix("base_model.model.").replace(".base_layer", "")
        linear.discard(short)
        parameter = getattr(module, "parameter_name", None)
        print("adapter:", f"{short} ({parameter})" if parameter else short)
for name in sorted(linear):
    print("linear layer without an adapter:", name)
PY
cat >"$folder/seen.txt" <<'TEXT'
peft 0.21.2 transformers 5.23.0
adapter: model.layers.0.self_attn.q_proj
adapter: model.layers.0.self_attn.k_proj
adapter: model.layers.0.self_attn.v_proj
adapter: model.layers.0.self_attn.o_proj
adapter: model.layers.1.self_attn.q_proj
adapter: model.layers.1.self_attn.k_proj
adapter: model.layers.1.self_attn.v_proj
adapter: model.layers.1.self_attn.o_proj
adapter: model.layers.1.mlp.experts (down_proj)
adapter: model.layers.1.mlp.experts (gate_up_proj)
adapter: model.layers.1.mlp.gate (weight)
linear layer without an adapter: lm_head
linear layer without an adapter: model.layers.0.mlp.down_proj
linear layer without an adapter: model.layers.0.mlp.gate_proj
linear layer without an adapter: model.layers.0.mlp.up_proj
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
