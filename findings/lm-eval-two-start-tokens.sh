#!/usr/bin/env bash
# lm-eval: rolling likelihoods (perplexity tasks) give the model two start tokens.
#
# Guess: a text is scored after one start token, as loglikelihood scores it.
# Seen: if the tokenizer adds a start token, loglikelihood_rolling adds a second one. The first
# prediction of each text is then the start token after a start token, and it counts in the sum.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  lm-eval==0.4.13 accelerate==1.15.0 peft==0.21.2 \
  torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 datasets==5.2.0 numpy==2.4.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
from importlib.metadata import version

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("<s>", "one", "two", "three")
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<s>")
config = LlamaConfig(
    vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=1, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


class Printing(LlamaForCausalLM):
    """Prints the tokens that it receives. Each of the four tokens is equally likely."""

    def forward(self, input_ids, **options):
        print("  the model receives", [WORDS[token] for token in input_ids[0]])
        return super().forward(input_ids, **options)


model = Printing(config)
torch.nn.init.zeros_(model.lm_head.weight)
harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
print("lm-eval", version("lm_eval"), "transformers", version("transformers"))
for kind, arguments in (
    ("loglikelihood", ("", "one two three")),
    ("loglikelihood_rolling", ("one two three",)),
):
    print(kind)
    answer = getattr(harness, kind)([Instance(kind, {}, arguments, 0)], disable_tqdm=True)[0]
    total = answer[0] if isinstance(answer, tuple) else answer
    print(f"  counts {total / torch.tensor(0.25).log().item():.0f} tokens of 1/4 each")
PY
cat >"$folder/seen.txt" <<'TEXT'
lm-eval 0.4.13 transformers 5.23.0
loglikelihood
  the model receives ['<s>', 'one', 'two']
  counts 3 tokens of 1/4 each
loglikelihood_rolling
  the model receives ['<s>', '<s>', 'one', 'two']
  counts 4 tokens of 1/4 each
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
