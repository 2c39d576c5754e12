"""Perfect packings: every row full, every example once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hasten.parts.data.packing import perfect_rows


def planted(seed: int, row: int, rows: int, pieces: int) -> NDArray[np.int64]:
    """Full rows, each cut at random places into up to so many pieces."""
    draw = np.random.default_rng(seed)
    cuts = [
        np.sort(draw.choice(np.arange(1, row), draw.integers(0, pieces), replace=False))
        for _ in range(rows)
    ]
    found: NDArray[np.int64] = np.concatenate([np.diff([0, *c, row]) for c in cuts])
    return found


@settings(deadline=None)
@given(st.integers(0, 999), st.integers(8, 300), st.integers(1, 6), st.integers(1, 4))
def test_a_perfect_packing_of_few_rows_is_found_and_holds_every_record_once(
    seed: int, row: int, rows: int, pieces: int
) -> None:
    counts = np.bincount(planted(seed, row, rows, pieces))
    found = perfect_rows(counts, row)
    assert found is not None
    placed = np.zeros_like(counts)
    for times, pattern in found:
        assert sum(pattern) == row
        np.add.at(placed, list(pattern), times)
    assert (placed == counts).all()
    assert found == perfect_rows(counts, row)


@pytest.mark.parametrize("row", [4096, 32768])
@pytest.mark.parametrize("rows", [10, 20])
@pytest.mark.parametrize("seed", range(3))
def test_long_rows_of_few_records_are_found_again(row: int, rows: int, seed: int) -> None:
    found = perfect_rows(np.bincount(planted(seed, row, rows, 4)), row)
    assert found is not None
    assert sum(times for times, _ in found) == rows


def test_where_no_packing_is_perfect_none_is_found() -> None:
    assert perfect_rows(np.bincount([6, 6, 5, 3]), 10) is None  # no sum of 10 has a 6
    assert perfect_rows(np.bincount([6, 3]), 10) is None  # not a whole number of rows


def test_nothing_is_packed_into_no_rows() -> None:
    assert perfect_rows(np.bincount([], minlength=1), 10) == []
