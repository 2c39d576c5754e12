"""Opens model folders in whatever transformers runs this file, which needs nothing else of ours.

    python tests/reader_job.py FOLDER...

Writes ``read.safetensors`` (logits of fixed tokens) into each folder, and prints a line of JSON for
each: what was opened, the ids of a text, and how the chat template writes a dialogue.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

TOKENS = torch.arange(3, 43).reshape(2, 20)
TEXT = "def f(x):\n    return  x + 2001 and words"
DIALOGUE = [{"role": "user", "content": "words"}, {"role": "assistant", "content": "numbers"}]


def read(folder: Path) -> dict[str, object]:
    """Opens the folder as a user of transformers does."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS).logits
    file = PreTrainedTokenizerFast.from_pretrained(folder)
    save_file({"logits": logits.float().contiguous()}, folder / "read.safetensors")
    return {
        "folder": str(folder),
        "release": transformers.__version__,
        "format": str(model.dtype),
        "problems": sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"]])),
        "ids": tokenizer(TEXT).input_ids,
        "ids_of_file": file(TEXT).input_ids,
        "eos": model.generation_config.eos_token_id,
        "text": tokenizer.apply_chat_template(DIALOGUE, tokenize=False),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(read(Path(name))))
