"""Rows filled by search and patterns: every example once, none overfull, bounds kept."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from hasten.parts.data.packing import plan_rows
from hasten.parts.data.row_search import exact_fit, whole_patterns

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
