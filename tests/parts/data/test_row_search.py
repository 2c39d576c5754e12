"""Rows filled one at a time: every example once, none overfull, the same for the same attempt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.row_search import exact_fit

ways = pytest.mark.parametrize("fewest", [False, True])


@ways
@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(50, 120),
    st.integers(0, 3),
)
def test_every_record_is_in_one_row_and_an_attempt_repeats_itself(
    fewest: bool, sizes: list[int], row: int, attempt: int
) -> None:
    counts = np.bincount(sizes, minlength=1)
    classes = exact_fit(counts, row, attempt, fewest)
    placed = np.zeros_like(counts)
    for times, pattern in classes:
        assert 0 < sum(pattern) <= row
        np.add.at(placed, list(pattern), times)
    assert (placed == counts).all()
    assert classes == exact_fit(counts, row, attempt, fewest)


def test_fewest_first_fills_a_row_with_the_fewest_records_that_can() -> None:
    counts = np.bincount([60, 30, 10, 20, 20])
    assert exact_fit(counts, 100, fewest=True)[0] == (1, (60, 30, 10))
    counts = np.bincount([60, 35, 5, 40, 20, 20])
    assert exact_fit(counts, 100, fewest=True) == [(1, (60, 40)), (1, (35, 20, 20, 5))]


def test_fewest_first_takes_the_fullest_row_where_none_is_full() -> None:
    assert exact_fit(np.bincount([60, 30, 8]), 100, fewest=True) == [(1, (60, 30, 8))]
    assert exact_fit(np.bincount([100, 100]), 100, fewest=True) == [(2, (100,))]
