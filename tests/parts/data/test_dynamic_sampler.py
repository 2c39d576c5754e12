"""Batches within a budget of tokens: every example once, equal work on ranks, exact resumption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hasten.parts.data.collate import padded
from hasten.parts.data.dynamic_batch import DynamicBatchSampler, example_lengths
from tiny import examples

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def ranks(lengths: Any, world: int, **changes: Any) -> list[list[list[int]]]:
    made = [
        DynamicBatchSampler(None, lengths=lengths, rank=r, world_size=world, **changes)
        for r in range(world)
    ]
    found = [list(sampler) for sampler in made]
    assert [len(sampler) for sampler in made] == [len(batches) for batches in found]
    return found


@given(LENGTHS, st.integers(50, 200), st.integers(1, 5), st.booleans(), st.booleans())
def test_every_record_comes_once_over_the_ranks_and_no_batch_exceeds_the_budget(
    lengths: list[int], budget: int, world: int, padding: bool, shuffle: bool
) -> None:
    found = ranks(lengths, world, max_tokens=budget, padded=padding, shuffle=shuffle, seed=5)
    assert len({len(batches) for batches in found}) == 1
    for batch in (b for batches in found for b in batches):
        mine = [lengths[i] for i in batch]
        assert (max(mine) * len(mine) if padding else sum(mine)) <= budget
    seen = sorted(i for batches in found for batch in batches for i in batch)
    if len(lengths) % world == 0 or len(lengths) != len(set(seen)) or len(seen) == len(lengths):
        assert set(seen) == set(range(len(lengths)))
    if len(seen) > len(lengths):  # repeated only where nothing was left to halve
        assert all(len(batch) == 1 for batches in found for batch in batches)
        assert len(seen) - len(lengths) < world


@given(LENGTHS, st.integers(1, 5))
def test_dropping_leaves_out_fewer_batches_than_there_are_ranks(
    lengths: list[int], world: int
) -> None:
    (whole,) = ranks(lengths, 1, max_tokens=60)
    found = ranks(lengths, world, max_tokens=60, drop_last=True)
    seen = [i for batches in found for batch in batches for i in batch]
    assert len(seen) == len(set(seen))
    assert 0 <= len(whole) - sum(map(len, found)) < world


@given(LENGTHS, st.data())
def test_a_resumed_epoch_goes_on_where_it_stopped(lengths: list[int], data: Any) -> None:
    sampler = DynamicBatchSampler(None, 60, lengths=lengths, seed=1)
    sampler.set_epoch(3)
    whole = list(sampler)
    stop = data.draw(st.integers(0, len(whole)))
    sampler.set_epoch(3)
    iterator = iter(sampler)
    before = [next(iterator) for _ in range(stop)]
    again = DynamicBatchSampler(None, 60, lengths=lengths, seed=1)
    again.load_state_dict(sampler.state_dict(batches_done=stop))
    again.set_epoch(3)
    assert len(again) == len(whole)
    assert before + list(again) == whole
    again.set_epoch(3)
    assert list(again) == whole  # the next pass begins at the beginning
    again.load_state_dict(sampler.state_dict(batches_done=stop))
    again.set_epoch(4)
    assert len([i for batch in again for i in batch]) == len(lengths)  # as another epoch does


def test_the_position_counts_the_batches_that_were_handed_out() -> None:
    sampler = DynamicBatchSampler(None, 60, lengths=[30] * 9)
    iterator = iter(sampler)
    next(iterator), next(iterator)
    assert sampler.state_dict()["batches_done"] == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_hundred_thousand_records_come_once_with_little_padding_and_even_ranks(
    world: int,
) -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5, 0.8, 100_000).astype(int), 1, 4096)
    found = ranks(lengths, world, max_tokens=8192)
    seen = np.sort([i for batches in found for batch in batches for i in batch])
    assert np.array_equal(seen, np.arange(100_000))
    slots = np.array([[lengths[b].max() * len(b) for b in batches] for batches in found])
    assert lengths.sum() / slots.sum() > 0.97
    assert slots.max(0).sum() / slots.mean(0).sum() < 1.01


def test_epochs_differ_and_each_repeats_exactly() -> None:
    sampler = DynamicBatchSampler(None, 100, lengths=list(range(1, 50)))
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_pass_after_a_whole_one_has_the_next_epoch_s_order() -> None:
    told, untold = (DynamicBatchSampler(None, 100, lengths=range(1, 50)) for _ in range(2))
    for epoch in range(3):
        told.set_epoch(epoch)
        assert list(untold) == list(told)
    begun = DynamicBatchSampler(None, 100, lengths=range(1, 50))
    first = next(iter(begun))
    assert next(iter(begun)) == first  # a pass that was left begins anew


def test_without_shuffling_records_keep_their_order() -> None:
    sampler = DynamicBatchSampler(None, 10, lengths=[4, 4, 4, 9, 2, 2], shuffle=False)
    assert list(sampler) == [[0, 1], [2], [3], [4, 5]]


def test_lengths_come_from_the_records() -> None:
    data = examples(5)
    expected = [r.length for r in data]
    assert example_lengths(data).tolist() == expected
    assert example_lengths([{"input_ids": r.input_ids} for r in data]).tolist() == expected
    assert example_lengths([r.input_ids.tolist() for r in data]).tolist() == expected


def test_lengths_come_from_the_articles_records() -> None:
    class Row:
        tokens = (1, 2, 3)

    two = torch.ones(2)
    data = [{"input": two, "target": two}, {"inputs": [1] * 3}, Row(), (two, torch.ones(9))]
    assert example_lengths(data).tolist() == [2, 3, 3, 2]


@pytest.mark.parametrize("example", [(torch.ones(2, 2), [3]), 7, {"text": "a"}, ("ab", 1)])
def test_a_record_without_a_length_is_named(example: Any) -> None:
    with pytest.raises(ValueError, match=r"example 1 .* give lengths="):
        DynamicBatchSampler([[1, 2], example])


def test_a_record_beyond_the_budget_is_alone_or_refused_or_left_out_and_said() -> None:
    lengths = [3, 70, 90, 4]
    with pytest.warns(
        UserWarning, match="2 examples have more .* longest 90, and are a batch each"
    ):
        alone = DynamicBatchSampler(None, 64, lengths=lengths)
    batches = sorted(map(sorted, alone))
    assert batches in ([[0, 3], [1], [2]], [[0], [1], [2], [3]])
    with pytest.warns(UserWarning, match="are left out"):
        dropped = DynamicBatchSampler(None, 64, lengths=lengths, too_long="drop")
    assert sorted(i for batch in dropped for i in batch) == [0, 3]
    with pytest.raises(ValueError, match="example 1 has 70 tokens, more than max_tokens=64"):
        DynamicBatchSampler(None, 64, lengths=lengths, too_long="error")
    with pytest.raises(ValueError, match="too_long is 'cut'; give alone, error, drop"):
        DynamicBatchSampler(None, 64, lengths=lengths, too_long="cut")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="examples=2 and this sampler 4"):
        alone.load_state_dict(dropped.state_dict())


def test_an_impossible_rank_and_a_strange_state_are_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2"):
        DynamicBatchSampler(None, lengths=[1], rank=2, world_size=2)
    state = DynamicBatchSampler(None, 64, lengths=[1, 2]).state_dict()
    with pytest.raises(ValueError, match="max_tokens=64 and this sampler 32"):
        DynamicBatchSampler(None, 32, lengths=[1, 2]).load_state_dict(state)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([3, 5], "2 numbers and the dataset 3 examples"),
        ([3, 5, 2, 1], "4 numbers and the dataset 3 examples"),
        ([3.5, 5, 2], "one whole number for each example"),
        ([[3, 5, 2]], "one whole number for each example"),
    ],
)
def test_lengths_of_other_examples_are_refused(lengths: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DynamicBatchSampler([[0] * 3, [0] * 5, [0] * 2], 8, lengths=lengths)


@pytest.mark.parametrize("settings", [{"max_tokens": 0}, {"seed": -1}])
def test_a_budget_or_seed_below_the_least_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least 1, and at least 0"):
        DynamicBatchSampler(None, lengths=[1], **settings)


def test_it_feeds_a_data_loader_with_workers() -> None:
    data = examples(40)
    sampler = DynamicBatchSampler(data, 120, seed=2)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=padded, num_workers=2)  # type: ignore[arg-type, var-annotated]
    shapes = [tuple(batch["input_ids"].shape) for batch in loader]
    sampler.set_epoch(0)
    assert len(loader) == len(shapes)
    assert shapes == [(len(b), max(data[i].length for i in b)) for b in sampler]
