"""Eval examples in the training data are counted exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.parts.data.collate import TokenizedExample, tokenized_example
from hasten.recipe.prepared_data import overlap


class Examples(list[TokenizedExample]):
    @property
    def lengths(self) -> Any:
        return np.asarray([r.length for r in self], np.int32)

    @property
    def trained_counts(self) -> Any:
        return np.asarray([r.trained_tokens for r in self], np.int32)


class Both:
    def __init__(self, train: Any, eval_data: Any) -> None:
        self.train, self.eval_data = train, eval_data


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(texts, texts)
def test_the_count_is_that_of_a_plain_search(train: list[Any], eval_data: list[Any]) -> None:
    found = overlap(
        Both(Examples(map(tokenized_example, train)), Examples(map(tokenized_example, eval_data)))
    )
    assert found.count == sum(example in train for example in eval_data)
    assert found.eval_data == len(eval_data)
    assert bool(found.advice) == (found.count > 0)


def test_nothing_eval_data_overlaps_with_nothing() -> None:
    assert overlap(Both(Examples([tokenized_example([1, 2])]), ())).advice == ""


@pytest.mark.parametrize(("count", "words"), [(1, "1 of 2 eval examples stands"), (2, "stand ")])
def test_the_advice_counts_and_says_what_to_do(count: int, words: str) -> None:
    eval_data = [[1, 2], [3, 4]]
    train = Examples(map(tokenized_example, eval_data[:count]))
    advice = overlap(Both(train, Examples(map(tokenized_example, eval_data)))).advice
    assert words in advice
    assert "eval_data a file of its own" in advice
