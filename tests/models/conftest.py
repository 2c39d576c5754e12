"""Fixtures of the tests of this package: a small tokenizer, and one saved model to be damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 300


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["def f(x):\n    return x + 1\n", "2001 words, and 3 numbers"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return _saved("deepseek-llm-tiny", tmp_path_factory, tokenizer)


@pytest.fixture(scope="session")
def saved_v3(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return _saved("v3-tiny", tmp_path_factory, tokenizer)


def _saved(preset: str, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    from hasten.models.load import load_model
    from hasten.models.save import save_model

    folder = tmp_path_factory.mktemp("saved") / preset
    save_model(load_model(preset, vocab_size=VOCABULARY), tokenizer, folder)
    return folder
