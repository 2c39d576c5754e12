"""Token examples: two rows of one length, and a count that leaves the first token out."""

from __future__ import annotations

import numpy as np
import pytest

from hasten.parts.data.collate import tokenized_example


def test_every_token_carries_loss_unless_told_otherwise() -> None:
    example = tokenized_example([5, 6, 7])
    assert example.trained.tolist() == [True, True, True]
    assert (example.input_ids.dtype, example.trained.dtype) == (np.int32, np.bool_)


def test_the_first_token_is_never_counted_as_trained() -> None:
    assert tokenized_example([5, 6, 7], [1, 0, 1]).trained_tokens == 1
    assert tokenized_example([5], [1]).trained_tokens == 0


def test_length_counts_every_token() -> None:
    assert tokenized_example(range(11), [0] * 11).length == 11


@pytest.mark.parametrize(
    ("ids", "trained"),
    [([1, 2, 3], [True, False]), ([[1, 2], [3, 4]], None), ([[1, 2]], [[True, True]])],
)
def test_rows_of_another_shape_are_refused(ids: list[int], trained: list[bool] | None) -> None:
    with pytest.raises(ValueError, match="two equal-length rows"):
        tokenized_example(ids, trained)
