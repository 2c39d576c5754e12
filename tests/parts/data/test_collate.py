"""Collators and cuts: exactly what a plain loop over the examples asks for."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.data.collate import (
    IGNORED,
    TokenizedExample,
    by_count,
    by_positions,
    by_tokens,
    collate_fn,
    packed,
    padded,
    tokenized_example,
)
from tiny import examples

Question = tuple[tuple[int, ...], int]  # (everything that is seen, the token to predict)
PAD = 7  # occurs in examples as well, so that filler can't be told from tokens by its value

EXAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=15).map(
        lambda pairs: tokenized_example([p[0] for p in pairs], [p[1] for p in pairs])
    ),
    min_size=1,
    max_size=8,
)


def asked(given_records: list[TokenizedExample]) -> Counter[Question]:
    """What training on these examples asks, by the definition."""
    found: Counter[Question] = Counter()
    for example in given_records:
        ids = example.input_ids.tolist()
        for t in range(1, len(ids)):
            if example.trained[t]:
                found[tuple(ids[:t]), ids[t]] += 1
    return found


def asked_by_padded(given_records: list[TokenizedExample]) -> Counter[Question]:
    batch = padded(given_records, PAD)
    found: Counter[Question] = Counter()
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        found.update((tuple(ids[: t + 1]), y) for t, y in enumerate(labels) if y != IGNORED)
    return found


def asked_by_packed(given_records: list[TokenizedExample]) -> Counter[Question]:
    batch = packed(given_records)
    rows = (batch[k][0].tolist() for k in ("input_ids", "labels", "position_ids"))
    ids, labels, positions = rows
    return Counter(
        (tuple(ids[t - positions[t] : t + 1]), y) for t, y in enumerate(labels) if y != IGNORED
    )


@given(given_records=EXAMPLES)
def test_padded_and_packed_ask_what_the_records_ask(given_records: list[TokenizedExample]) -> None:
    expected = asked(given_records)
    assert asked_by_padded(given_records) == expected
    assert asked_by_packed(given_records) == expected
    assert sum(r.trained_tokens for r in given_records) == expected.total()


@given(given_records=EXAMPLES)
def test_a_packed_row_is_the_records_end_to_end(given_records: list[TokenizedExample]) -> None:
    batch = packed(given_records)
    pieces = [t.tolist() for t in batch["input_ids"][0].split(batch["document_lengths"])]
    longest_first = sorted(given_records, key=lambda r: -r.length)  # stable: ties keep their order
    assert pieces == [r.input_ids.tolist() for r in longest_first]
    assert batch["input_ids"].shape == (1, sum(r.length for r in given_records))


@given(given_records=EXAMPLES)
def test_positions_lengths_and_boundaries_tell_the_same_story(
    given_records: list[TokenizedExample],
) -> None:
    batch = packed(given_records)
    starts = (batch["position_ids"][0] == 0).nonzero().squeeze(1).tolist()
    assert batch["boundaries"].tolist() == [*starts, batch["input_ids"].shape[1]]
    assert batch["boundaries"].dtype == torch.int32  # what the kernels take
    assert tuple(np.diff(batch["boundaries"])) == batch["document_lengths"]
    for positions in batch["position_ids"][0].split(batch["document_lengths"]):
        assert positions.tolist() == list(range(len(positions)))


@given(given_records=EXAMPLES)
def test_padded_rows_keep_their_order_and_end_in_filler(
    given_records: list[TokenizedExample],
) -> None:
    batch = padded(given_records, PAD)
    longest = max(r.length for r in given_records)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(given_records), longest)
    for ids, labels, example in zip(
        batch["input_ids"], batch["labels"], given_records, strict=True
    ):
        assert ids[: example.length].tolist() == example.input_ids.tolist()
        assert (ids[example.length :] == PAD).all()
        assert (labels[example.length :] == IGNORED).all()


def test_records_are_left_as_they_were() -> None:
    given_records = examples(5)
    before = [(r.input_ids.copy(), r.trained.copy()) for r in given_records]
    packed(given_records)["labels"].fill_(3)
    padded(given_records)["input_ids"].fill_(3)
    for example, (ids, trained) in zip(given_records, before, strict=True):
        assert np.array_equal(example.input_ids, ids)
        assert np.array_equal(example.trained, trained)


def test_the_articles_records_are_padded_behind_each() -> None:
    rows = [(torch.tensor([1, 2, 3]), torch.tensor([4])), (torch.tensor([5]), torch.tensor([6, 7]))]
    named = [{"input": one, "target": two} for one, two in rows]
    for batch in (rows, named):
        inputs, targets = collate_fn(batch, padding=9, target_padding=-100)
        assert inputs.tolist() == [[1, 2, 3], [5, 9, 9]]
        assert targets.tolist() == [[4, -100], [6, 7]]
    assert collate_fn(rows)[0].tolist() == [[1, 2, 3], [5, 0, 0]]
    with pytest.raises(ValueError, match=r"example 1 .* it has text"):
        collate_fn([rows[0], {"text": "a"}])
    with pytest.raises(ValueError, match="no examples"):
        collate_fn([])


def test_examples_of_several_dtypes_keep_their_numbers() -> None:
    inputs, targets = collate_fn([(torch.tensor([1, 2]), 3), ([0.5, 1.5, 2.5], 4)])
    assert inputs.tolist() == [[1, 2, 0], [0.5, 1.5, 2.5]]
    assert targets.tolist() == [3, 4]  # classes, one for each example
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("values", "settings", "sentence"),
    [
        ([torch.ones(2, 3), torch.ones(4)], {}, r"shapes \[2, 3\] and \[4\]"),
        ([[1], "ab"], {}, "input can't become a tensor"),
        ([[1], [2]], {"padding": 0.5}, "torch.int64, .* can't hold the padding 0.5"),
        ([[True], [False]], {"padding": -1}, "torch.bool, .* can't hold the padding -1"),
    ],
)
def test_examples_of_no_one_form_are_refused(
    values: list[Any], settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        collate_fn([(value, 1) for value in values], **settings)


def test_every_token_carries_loss_unless_told_otherwise() -> None:
    example = tokenized_example([5, 6, 7])
    assert example.trained.tolist() == [True, True, True]
    assert (example.input_ids.dtype, example.trained.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize(
    ("ids", "trained"),
    [([1, 2, 3], [True, False]), ([[1, 2], [3, 4]], None), ([[1, 2]], [[True, True]])],
)
def test_rows_of_another_shape_are_refused(ids: list[int], trained: list[bool] | None) -> None:
    with pytest.raises(ValueError, match="two equal-length rows"):
        tokenized_example(ids, trained)


LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(examples=st.lists(st.integers()), size=st.integers(1, 50))
def test_by_count_keeps_every_record_in_its_order(examples: list[int], size: int) -> None:
    pieces = by_count(examples, size)
    assert [r for piece in pieces for r in piece] == examples
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(1 <= len(piece) <= size for piece in pieces)
    assert pieces == by_count(examples, size)


@given(lengths=LENGTHS, limit=st.integers(1, 80))
def test_by_tokens_makes_few_pieces_of_every_record_once(lengths: list[int], limit: int) -> None:
    pieces = by_tokens(range(len(lengths)), lengths, limit)
    assert sorted(r for piece in pieces for r in piece) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in piece) for piece in pieces]
    assert all(s <= limit or len(piece) == 1 for s, piece in zip(sums, pieces, strict=True))
    assert all(left + right > limit for left, right in combinations(sums, 2))
    assert pieces == by_tokens(tuple(range(len(lengths))), tuple(lengths), limit)


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
