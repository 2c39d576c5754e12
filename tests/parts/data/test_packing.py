"""Packing: every example once, no row overfull, as few rows as there have to be."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from covering import covering
from hasten.parts.data.packing import choose_method, lower_bound, pack_lengths, plan_rows

ROW = 4096
Sizes = NDArray[np.int64]


def skewed(count: int, seed: int = 0) -> Sizes:
    draw = np.random.default_rng(seed)
    return np.clip(draw.lognormal(5.8, 1.0, count), 8, ROW).astype(np.int64)


def planted(seed: int, row: int, rows: int, pieces: int) -> Sizes:
    """Full rows, each cut at random places into up to so many pieces, and shuffled."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        cuts = np.sort(draw.choice(np.arange(1, row), int(draw.integers(0, pieces)), replace=False))
        found += np.diff([0, *cuts, row]).tolist()
    return draw.permutation(np.array(found))


def fewest_rows(lengths: tuple[int, ...], row: int) -> int:
    """The optimum by trying everything: the independent reference."""

    @functools.cache
    def place(rest: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        if not rest:
            return len(rooms)
        options = [place(rest[1:], tuple(sorted((*rooms, row - rest[0]))))]
        for i, room in enumerate(rooms):
            if room >= rest[0]:
                left = (*rooms[:i], room - rest[0], *rooms[i + 1 :])
                options.append(place(rest[1:], tuple(sorted(left))))
        return min(options)

    return place(tuple(sorted(lengths, reverse=True)), ())


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 120))
def test_every_record_lies_in_one_row_and_no_row_is_overfull(sizes: list[int], row: int) -> None:
    rows = pack_lengths(sizes, row)
    assert sorted(i for r in rows for i in r) == list(range(len(sizes)))
    assert all(r and sum(sizes[i] for i in r) <= row for r in rows)
    for one, two in itertools.combinations(rows, 2):  # no two rows could have been one
        assert sum(sizes[i] for i in [*one, *two]) > row
    assert rows == pack_lengths(np.array(sizes, np.int64), row)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_small_sets_are_packed_into_as_few_rows_as_trying_everything_finds(
    sizes: list[int],
) -> None:
    best = fewest_rows(tuple(sizes), 20)
    assert lower_bound(np.bincount(sizes), 20) <= best
    assert len(pack_lengths(sizes, 20)) == best


@pytest.mark.parametrize(
    ("row", "rows", "pieces"), covering([20, 100, ROW], [3, 10, 50, 200], [4, 7], rounds=2)
)
def test_rows_that_were_cut_up_are_found_again_but_for_one_at_most(
    row: int, rows: int, pieces: int
) -> None:
    for seed in range(5):
        assert rows <= len(pack_lengths(planted(seed, row, rows, pieces), row)) <= rows + 1


def test_skewed_lengths_fill_rows_to_995_in_a_thousand() -> None:
    for seed in range(3):
        found = plan_rows(skewed(50_000, seed), ROW).efficiency
        assert found.fullness >= 0.995
        assert found.tokens == skewed(50_000, seed).sum()


@pytest.mark.parametrize("shape", ["uniform", "constant", "skewed"])
def test_records_of_at_most_half_a_row_need_no_more_than_the_bound_and_a_hundredth(
    shape: str,
) -> None:
    draw = np.random.default_rng(1)
    lengths = {
        "uniform": draw.integers(1, ROW // 2 + 1, 20_000),
        "constant": draw.normal(500, 8, 20_000).astype(np.int64),
        "skewed": np.minimum(skewed(20_000), ROW // 2),
    }[shape]
    found = plan_rows(lengths, ROW).efficiency
    assert found.rows <= 1.01 * found.lower_bound


def test_records_of_equal_length_are_taken_in_the_order_given() -> None:
    lengths = [5, 5, 5, 5]
    plan = plan_rows(lengths, 10)
    assert plan.fill(lengths) == [[0, 1], [2, 3]]
    assert plan.fill(lengths, np.array([3, 1, 0, 2])) == [[3, 1], [0, 2]]
    lengths = [2, 9, 5, 8, 1, 5]
    rows = plan_rows(lengths, 10).fill(lengths, np.array([5, 4, 3, 2, 1, 0]))
    assert sorted(rows) == [[1, 4], [3, 0], [5, 2]]


def test_nothing_packs_into_nothing() -> None:
    assert pack_lengths([], 10) == []
    assert plan_rows([], 10).efficiency.fullness == 1.0
    assert choose_method([], 10).method == "both"


@pytest.mark.parametrize(
    ("lengths", "row", "message"),
    [
        ([3, 12], 10, "example 1 has 12 tokens, more than a row of 10"),
        ([3, 0], 10, "each at least 1"),
        ([3], 0, "row_tokens is 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(lengths: list[int], row: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_lengths(lengths, row)


def test_lengths_that_do_not_add_up_to_a_row_are_grouped() -> None:
    draw = np.random.default_rng(0)
    short, long = draw.normal(2250, 20, 5000), draw.normal(3900, 20, 5000)
    found = choose_method(np.concatenate([short, long]).astype(np.int64), ROW)
    assert found.method == "group"
    assert found.packed == pytest.approx(0.75, abs=0.01)
    assert found.grouped > 0.996


def test_few_skewed_records_are_packed_and_many_may_be_either() -> None:
    assert choose_method(skewed(400), ROW).method == "pack"
    many = choose_method(skewed(50_000), ROW)
    assert many.method == "both"
    assert "either will do" in many.reason
