"""The tokenizer trained on the spot: exact, repeatable, kept whole on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.data.tokenize import SMALLEST, SPECIAL, train_bpe
from hasten.errors import InputError

TEXTS = ["the cat sat on the mat", "def f(x):\n\treturn  x ** 2\n", "你好，世界"] * 5


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_are_used_and_special_tokens_come_first(tokenizer: Any) -> None:
    assert len(tokenizer.encode("apples")) < len("apples")
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == SPECIAL
    assert len(train_bpe(TEXTS, 280)) == 280


def test_the_same_texts_give_the_same_tokenizer() -> None:
    first, second = (train_bpe(iter(TEXTS), 300) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "She had  twelve\n\napples, 你好 \U0001f34e"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.chat_template == PROMPT_FORMATS["deepseek-llm"]
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.model_max_length == tokenizer.model_max_length > 10**6


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(InputError, match=f"{SMALLEST} do"):
        train_bpe(TEXTS, SMALLEST - 1)
    assert len(train_bpe([], SMALLEST)) == SMALLEST
