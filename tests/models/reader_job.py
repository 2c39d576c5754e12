"""Opens model folders in whatever transformers runs this file, which needs nothing else of ours.

    python tests/models/reader_job.py FOLDER...

Writes ``read.safetensors`` (logits of fixed tokens) into each folder, and prints a line of JSON for
each: what was opened, the ids of a text, and how the chat template writes a dialogue.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

TOKENS = torch.arange(3, 43).reshape(2, 20)
TEXT = "def f(x):\n    return  x + 2001 and words"
GGUF = {"llama": "llama", "qwen2": "qwen2", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"}
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
        "gguf": read_as_gguf(folder) if importlib.util.find_spec("gguf") else None,
    }


def read_as_gguf(folder: Path) -> dict[str, object]:
    """What llama.cpp's converter would find: end token, chat template, and a name for each weight.

    For DeepSeek it stacks the experts of a layer under one name and puts a dot into
    e_score_correction_bias first (convert_hf_to_gguf.py, DeepseekV2Model).
    """
    import gguf
    from gguf.vocab import SpecialVocab

    config = json.loads((folder / "config.json").read_text())
    arch = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == GGUF[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {re.sub(r"experts\.\d+\.", "experts.", name) for name in file.keys()}  # noqa: SIM118
    stored = {name.replace("correction_bias", "correction.bias") for name in stored}
    vocabulary = SpecialVocab(folder, load_merges=True)
    return {
        "unknown": sorted(n for n in stored if names.get_name(n, (".weight", ".bias")) is None),
        "eos": vocabulary.special_token_ids.get("eos"),
        "template": vocabulary.chat_template,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(read(Path(name))))
