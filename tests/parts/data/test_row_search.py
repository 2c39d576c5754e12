"""Rows filled by search, cover and patterns: every example once, none overfull, bounds kept."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from hasten.parts.data.packing import perfect_rows, plan_rows
from hasten.parts.data.row_search import (
    MOST_IN_A_ROW,
    RowSearch,
    exact_fit,
    full_rows,
    whole_patterns,
)

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


def planted(seed: int, row: int, rows: int, pieces: int) -> NDArray[np.int64]:
    """Full rows, each cut at random places into up to so many pieces."""
    draw = np.random.default_rng(seed)
    cuts = [
        np.sort(draw.choice(np.arange(1, row), draw.integers(0, pieces), replace=False))
        for _ in range(rows)
    ]
    found: NDArray[np.int64] = np.concatenate([np.diff([0, *c, row]) for c in cuts])
    return found


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


ROW = 4096


def programme(lengths: list[int], row: int) -> float:
    """The fewest fractional rows over all patterns, listed one by one: the reference."""
    counts = np.bincount(lengths)
    sizes = np.flatnonzero(counts)
    most = [range(min(row // n, counts[n]) + 1) for n in sizes.tolist()]
    patterns = np.array([p for p in itertools.product(*most) if 0 < np.dot(p, sizes) <= row])
    found = linprog(np.ones(len(patterns)), A_eq=patterns.T, b_eq=counts[sizes])
    assert found.success
    return float(found.fun)


@given(st.lists(st.sampled_from([7, 11, 13, 18, 20, 29]), min_size=1, max_size=60))
def test_the_bound_is_that_of_the_programme_over_all_patterns(lengths: list[int]) -> None:
    bound, _ = whole_patterns(np.bincount(lengths), 60)
    assert bound == int(np.ceil(programme(lengths, 60) - 1e-6))


@given(st.lists(st.integers(1, 40), max_size=120), st.integers(40, 90))
def test_patterns_use_no_record_twice_and_leave_at_most_a_row_for_each_length(
    lengths: list[int], row: int
) -> None:
    counts = np.bincount(lengths, minlength=1)
    bound, classes = whole_patterns(counts, row)
    used = np.zeros_like(counts)
    for times, pattern in classes:
        assert times > 0
        assert 0 < sum(pattern) <= row
        np.add.at(used, list(pattern), times)
    assert (used <= counts).all()
    assert bound <= sum(times for times, _ in classes) + np.count_nonzero(counts)
    assert bound <= len(lengths)


@pytest.mark.parametrize("values", [2, 3, 5, 20])
@pytest.mark.parametrize("share", [(0.3, 0.45), (0.05, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_few_different_lengths_need_hardly_more_rows_than_the_bound(
    values: int, share: tuple[float, float], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    kinds = draw.integers(int(share[0] * ROW), int(share[1] * ROW) + 1, values)
    lengths = draw.choice(kinds, 20_000, p=draw.dirichlet(np.full(values, 2)))
    found = plan_rows(lengths, ROW).efficiency
    assert found.rows <= found.lower_bound + 2


def test_nothing_needs_no_row() -> None:
    assert whole_patterns(np.zeros(1, int), 10) == (0, [])
