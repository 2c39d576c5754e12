#!/usr/bin/env bash
# transformers: if truncation on the left cuts an answer, the mask of all later answers is empty.
#
# Guess: apply_chat_template(return_assistant_tokens_mask=True) marks the answers, or parts of
# answers, that remain after truncation.
# Seen: as soon as the start of one answer is cut away, no token is marked. The whole answers
# behind it aren't either, so training on this mask learns nothing from the dialogue.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("<pad>", "user:", "assistant:", *"abcdefghi")
inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", truncation_side="left"
)
tokenizer.chat_template = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ ' ' }}{% endfor %}"
)
chat = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d e"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g h i"},
]
print("transformers", version("transformers"))
for length in (12, 10, 8):
    encoded = tokenizer.apply_chat_template(
        chat,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=length,
    )
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    print(f"max_length={length}:", *tokens)
    marks = encoded["assistant_masks"]
    print("  marked:", *(t for t, mark in zip(tokens, marks, strict=True) if mark))
PY
cat >"$folder/seen.txt" <<'TEXT'
transformers 5.23.0
max_length=12: a b assistant: c d e user: f assistant: g h i
  marked: c d e g h i
max_length=10: assistant: c d e user: f assistant: g h i
  marked: c d e g h i
max_length=8: d e user: f assistant: g h i
  marked:
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
