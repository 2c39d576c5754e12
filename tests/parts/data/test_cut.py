"""Cuts: every example once, no piece above its limit, the same pieces every time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.collate import by_count, by_positions, by_tokens

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(examples=st.lists(st.integers()), size=st.integers(1, 50))
def test_by_count_keeps_every_record_in_its_order(examples: list[int], size: int) -> None:
    pieces = by_count(examples, size)
    assert [r for piece in pieces for r in piece] == examples
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(1 <= len(piece) <= size for piece in pieces)
    assert pieces == by_count(examples, size)


@given(lengths=LENGTHS, limit=st.integers(1, 80))
def test_by_tokens_keeps_every_record_once(lengths: list[int], limit: int) -> None:
    pieces = by_tokens(range(len(lengths)), lengths, limit)
    assert sorted(r for piece in pieces for r in piece) == list(range(len(lengths)))
    assert all(pieces)


@given(lengths=LENGTHS, limit=st.integers(1, 80))
def test_only_a_single_record_exceeds_the_limit(lengths: list[int], limit: int) -> None:
    for piece in by_tokens(range(len(lengths)), lengths, limit):
        assert sum(lengths[i] for i in piece) <= limit or len(piece) == 1


@given(lengths=LENGTHS, limit=st.integers(1, 80))
def test_by_tokens_is_deterministic(lengths: list[int], limit: int) -> None:
    names = [f"example {i}" for i in range(len(lengths))]
    assert by_tokens(names, lengths, limit) == by_tokens(tuple(names), tuple(lengths), limit)


@given(lengths=LENGTHS, limit=st.integers(1, 80))
def test_no_two_pieces_could_have_been_one(lengths: list[int], limit: int) -> None:
    sums = [sum(lengths[i] for i in p) for p in by_tokens(range(len(lengths)), lengths, limit)]
    assert all(left + right > limit for left, right in combinations(sums, 2))


def test_a_record_goes_into_the_fullest_piece_that_holds_it() -> None:
    assert by_tokens("abc", [6, 5, 4], 10) == [["a", "c"], ["b"]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_would_lose_records_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size is {size}"):
        by_count([1, 2, 3], size)


@given(lengths=st.lists(st.integers(1, 60), max_size=40), limit=st.integers(1, 200))
def test_by_slots_keeps_the_order_and_its_rows_within_the_limit(
    lengths: list[int], limit: int
) -> None:
    pieces = by_positions(range(len(lengths)), lengths, limit)
    assert [r for piece in pieces for r in piece] == list(range(len(lengths)))
    for piece in pieces:
        assert max(lengths[i] for i in piece) * len(piece) <= limit or len(piece) == 1
    for left, right in pairwise(pieces):
        longer = [lengths[i] for i in [*left, right[0]]]
        assert max(longer) * len(longer) > limit
