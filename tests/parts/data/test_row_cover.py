"""Lists that leave out no full row, and covers that leave out no example."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.row_search import MOST_IN_A_ROW, RowSearch, full_rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 30))
def test_the_list_has_each_full_row_of_three_and_more_once(sizes: list[int], row: int) -> None:
    kinds, counts = np.unique(sizes, return_counts=True)
    falling, counts = kinds[::-1], counts[::-1]
    expected = {
        tuple(sorted(part, reverse=True))
        for number in range(3, MOST_IN_A_ROW + 1)
        for part in itertools.combinations(sizes, number)
        if sum(part) == row
    }
    rows, _ = full_rows(falling, counts, row)
    found = [tuple(falling[r[r < len(falling)]].tolist()) for r in rows]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_cover_holds_records_of_one_length_as_often_as_there_are_any() -> None:
    sizes, counts = np.array([6, 4, 3, 2]), np.array([1, 3, 2, 3])
    rows, work = full_rows(sizes, counts, 10)
    assert work > 0
    found = RowSearch(rows, counts).choose_rows(1000, random.Random(0))
    assert found is not None
    assert sorted(sizes[place] for row in found for place in row) == [2, 2, 2, 3, 3, 4, 4, 4, 6]
    assert [sum(sizes[row].tolist()) for row in found] == [10, 10, 10]


def test_where_there_is_no_cover_the_search_says_so() -> None:
    sizes, counts = np.array([6, 5, 3]), np.array([2, 1, 1])
    cover = RowSearch(full_rows(sizes, counts, 10)[0], counts)
    assert cover.choose_rows(1000, random.Random(0)) is None
    assert cover.exhausted
