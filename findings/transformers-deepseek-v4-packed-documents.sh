#!/usr/bin/env bash
# transformers: packed documents of DeepSeek-V4 read each other, although positions restart.
#
# Guess: with position_ids that restart, documents that share a row are independent of each other,
# as transformers handles packed rows of other models (DataCollatorWithFlattening makes them).
# Seen: V3's second document has the logits that it has alone, whatever stands before it. V4's has
# others, which depend on the first document: its windows and its compressed keys are counted from
# the start of the row.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 transformers==5.23.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch
import transformers
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV4Config

common = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
v3 = DeepseekV3Config(
    **common,
    intermediate_size=32,
    num_hidden_layers=2,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_group=1,
    topk_group=1,
)
v4 = DeepseekV4Config(
    **common,
    num_hidden_layers=4,
    head_dim=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=8,
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    partial_rotary_factor=0.5,
    index_n_heads=16,
    index_head_dim=8,
    index_topk=4,
    max_position_embeddings=128,
)
first, other, second = (
    torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(n)) for n in range(3)
)


@torch.no_grad()
def second_after(model, before):
    row = torch.cat([before, second], dim=1)
    positions = torch.arange(12).repeat(2)[None]
    return model(input_ids=row, position_ids=positions, use_cache=False).logits[0, 12:]


print("transformers", transformers.__version__)
for config in (v3, v4):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        alone = model(input_ids=second, use_cache=False).logits[0]
    found = second_after(model, first)
    print(config.model_type)
    print("  second document as alone:      ", torch.allclose(found, alone, atol=1e-4))
    same = torch.allclose(found, second_after(model, other), atol=1e-4)
    print("  independent of the first one:  ", same)
PY
cat >"$folder/seen.txt" <<'TEXT'
transformers 5.23.0
deepseek_v3
  second document as alone:       True
  independent of the first one:   True
deepseek_v4
  second document as alone:       False
  independent of the first one:   False
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
