#!/usr/bin/env bash
# transformers: a response_template makes the pipeline show special tokens, also of plain text.
#
# Guess: a tokenizer's response_template says how chat answers are read, and changes nothing for a
# prompt that is a text.
# Seen: with it, the text-generation pipeline decodes every output with its special tokens, so a plain
# text ends with the end token. skip_special_tokens=True is overruled, too.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet torch==2.13.0 transformers==5.23.0 \
  tokenizers==0.23.3 jinja2==3.1.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
from importlib.metadata import version

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

WORDS = ("<end>", "one", "two", "three")
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=len(WORDS),
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=0,
        bos_token_id=None,
    )
)
# After each word comes the next one, then the end.
with torch.no_grad():
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(4))
    model.lm_head.weight.copy_(torch.eye(4).roll(1, 0))
write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
print("transformers", version("transformers"))
template = {"start_anchor": "<answer>", "fields": {"content": {"close": "<end>"}}}
for name, value in (("without", None), ("with", template)):
    tokenizer.response_template = value
    for options in ({}, {"skip_special_tokens": True}):
        result = write("one", max_new_tokens=8, do_sample=False, **options)
        print(f"{name} response_template, {options}: {result[0]['generated_text']!r}")
PY
cat >"$folder/seen.txt" <<'TEXT'
transformers 5.23.0
without response_template, {}: 'onetwo three'
without response_template, {'skip_special_tokens': True}: 'onetwo three'
with response_template, {}: 'onetwo three <end>'
with response_template, {'skip_special_tokens': True}: 'onetwo three <end>'
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" 2>"$folder/log" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
