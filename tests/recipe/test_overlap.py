"""Held-out records in the training data are counted exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.parts.data.collate import TokenRecord, token_record
from hasten.recipe.prepared_data import overlap


class Records(list[TokenRecord]):
    @property
    def lengths(self) -> Any:
        return np.asarray([r.length for r in self], np.int32)

    @property
    def trained_counts(self) -> Any:
        return np.asarray([r.trained_tokens for r in self], np.int32)


class Both:
    def __init__(self, train: Any, held_out: Any) -> None:
        self.train, self.held_out = train, held_out


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(texts, texts)
def test_the_count_is_that_of_a_plain_search(train: list[Any], held_out: list[Any]) -> None:
    found = overlap(Both(Records(map(token_record, train)), Records(map(token_record, held_out))))
    assert found.count == sum(record in train for record in held_out)
    assert found.held_out == len(held_out)
    assert bool(found.advice) == (found.count > 0)


def test_nothing_held_out_overlaps_with_nothing() -> None:
    assert overlap(Both(Records([token_record([1, 2])]), ())).advice == ""


@pytest.mark.parametrize(("count", "words"), [(1, "1 of 2 held-out records stands"), (2, "stand ")])
def test_the_advice_counts_and_says_what_to_do(count: int, words: str) -> None:
    held_out = [[1, 2], [3, 4]]
    train = Records(map(token_record, held_out[:count]))
    advice = overlap(Both(train, Records(map(token_record, held_out)))).advice
    assert words in advice
    assert "held_out a file of its own" in advice
