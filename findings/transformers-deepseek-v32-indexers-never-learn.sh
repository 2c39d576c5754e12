#!/usr/bin/env bash
# transformers: weights of DeepSeek-V3.2 that are marked as trained never get a gradient.
#
# Guess: a weight with requires_grad that takes part in the forward pass has a gradient after
# backward(), so a model that trains without an error is trained as a whole.
# Seen: the indexers choose which keys the attention reads, run in every pass, and are marked as
# trained. They run without gradients, and no loss of their own exists, as DeepSeek's paper has it.
# After fine-tuning they choose keys for the model as it was before.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  torch==2.13.0 transformers==5.23.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import torch
import transformers
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

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

torch.manual_seed(0)
model = DeepseekV32ForCausalLM(DeepseekV32Config(**common)).train()
calls = []
for module in model.modules():
    if type(module).__name__ == "DeepseekV32Indexer":
        module.register_forward_hook(lambda *_: calls.append(1))
ids = torch.randint(0, 64, (1, 24))
model(input_ids=ids, labels=ids).loss.backward()
learns = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
indexers = [has for name, has in learns.items() if "indexer" in name]
others = [has for name, has in learns.items() if "indexer" not in name]
print("transformers", transformers.__version__)
print("indexers that ran:", len(calls))
print(f"trained weights with a gradient: {sum(others)} of {len(others)} others,", end=" ")
print(f"{sum(indexers)} of {len(indexers)} of indexers")
PY
cat >"$folder/seen.txt" <<'TEXT'
transformers 5.23.0
indexers that ran: 2
trained weights with a gradient: 27 of 27 others, 0 of 10 of indexers
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
