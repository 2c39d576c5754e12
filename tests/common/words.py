"""A tokenizer of a few words."""

from __future__ import annotations

import importlib
from typing import Any

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "home", "and", "then", "it"]


def tokenizer() -> Any:
    """One token per word; nothing is downloaded."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    names = ["<pad>", "<s>", "</s>", *WORDS]
    vocabulary = {word: index for index, word in enumerate(names)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
