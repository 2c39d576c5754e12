#!/usr/bin/env bash
# transformers: the keys that DeepSeek-V3.2 hands to a registered attention include later ones.
#
# Guess: an attention that is registered with AttentionInterface gets, as indices, the keys that
# each query attends to.
# Seen: the first queries have fewer earlier keys than index_topk. Their lists are filled with keys
# that come after them, without a mark. The mask hides these for eager and sdpa alone; an attention
# that reads the indices only, as a kernel for chosen keys does, lets a token see its successors.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 transformers==5.23.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.masking_utils import sdpa_mask

common = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}

given = []


def attention(module, query, key, value, mask, indices=None, **more):
    given.append(indices)
    return value.transpose(1, 2), None


AttentionInterface.register("listed_keys", attention)
AttentionMaskInterface.register("listed_keys", sdpa_mask)
torch.manual_seed(0)
config = DeepseekV32Config(**common, attn_implementation="listed_keys")
model = DeepseekV32ForCausalLM(config)
model(input_ids=torch.randint(0, 64, (1, 24)), use_cache=False)
print("transformers", transformers.__version__)
for layer, indices in enumerate(given):
    later = indices[0] > torch.arange(24)[:, None]
    print(f"layer {layer}: {int(later.sum())} of {indices.numel()} keys are later than their query")
PY
cat >"$folder/seen.txt" <<'TEXT'
transformers 5.23.0
layer 0: 28 of 192 keys are later than their query
layer 1: 28 of 192 keys are later than their query
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
