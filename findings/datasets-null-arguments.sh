#!/usr/bin/env bash
# datasets: the same dialogues render differently from Dataset.from_list and from a JSON file.
#
# Guess: the way a data set is loaded doesn't change what a chat template renders.
# Seen: from_list completes the arguments of each tool call with the keys of all other calls, set
# to None, and the chat template renders them as nulls. load_dataset("json") stores a column of
# JSON and adds nothing.

set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/pip" install --quiet --quiet \
  datasets==5.2.0 transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6 || exit 2

cat >"$folder/behaviour.py" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset, disable_progress_bars, load_dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

disable_progress_bars()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), unk_token="a"
)
tokenizer.chat_template = (
    "{% for message in messages %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %} {% endfor %}"
)


def dialogue(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]


rows = [
    {"messages": dialogue("weather", {"city": "Rome"})},
    {"messages": dialogue("add", {"a": 1, "b": 2})},
]
file = Path(sys.path[0], "rows.jsonl")
file.write_text("".join(json.dumps(row) + "\n" for row in rows))
from_file = load_dataset(
    "json", data_files=str(file), split="train", cache_dir=str(file.with_name("cache"))
)
print("datasets", version("datasets"), "transformers", version("transformers"))
for title, loaded in (("rows", rows), ("file", from_file), ("list", Dataset.from_list(rows))):
    text = tokenizer.apply_chat_template(loaded[0]["messages"], tokenize=False)
    print(f"{title}: {text.strip()}")
PY
cat >"$folder/seen.txt" <<'TEXT'
datasets 5.2.0 transformers 5.23.0
rows: go {"name": "weather", "arguments": {"city": "Rome"}}
file: go {"name": "weather", "arguments": {"city": "Rome"}}
list: go {"name": "weather", "arguments": {"city": "Rome", "a": null, "b": null}}
TEXT

"$folder/venv/bin/python" "$folder/behaviour.py" | tee "$folder/output.txt"
diff "$folder/seen.txt" "$folder/output.txt"
