"""Requests are merged where reads are near; examples and their order never change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hasten.parts.data.prefetch import (
    MOST_KEPT,
    RANGE,
    MergedReads,
    SmartPrefetcher,
    with_merged_reads,
)

COUNT = 4096


class CountedStore:
    """Examples that say what they are; counts requests and examples."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.requests, self.examples = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return int(self.read_range(index, index + 1)[0])

    def read_range(self, start: int, stop: int) -> Sequence[int]:
        assert 0 <= start < stop <= self.count
        self.requests += 1
        self.examples += stop - start
        return [10 * i for i in range(start, stop)]


def blocks(size: int, count: int = COUNT, seed: int = 0, of_blocks: bool = True) -> list[int]:
    draw = random.Random(seed)
    starts = list(range(0, count, size))
    if of_blocks:
        draw.shuffle(starts)
    parts = [list(range(s, min(s + size, count))) for s in starts]
    for part in parts:
        draw.shuffle(part)
    return [i for part in parts for i in part]


def shuffled(count: int = COUNT, seed: int = 0) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def strided(step: int, count: int = COUNT) -> list[int]:
    return [i for phase in range(step) for i in range(phase, count, step)]


@pytest.mark.parametrize(
    "order",
    [
        list(range(COUNT)),
        list(range(COUNT))[::-1],
        strided(2),
        strided(8),
        blocks(16),
        blocks(64),
        blocks(100),
        blocks(128, of_blocks=False),
    ],
    ids=["forwards", "backwards", "every 2nd", "every 8th", "16", "64", "100", "128"],
)
def test_a_pattern_saves_four_fifths_of_the_requests(order: list[int]) -> None:
    store = CountedStore()
    reader = MergedReads(store)
    assert [reader[i] for i in order] == [10 * i for i in order]
    assert store.requests <= 0.2 * len(order)
    assert len(reader._kept) <= MOST_KEPT


@pytest.mark.parametrize(
    "order", [shuffled(), strided(50), [5] * 40], ids=["random", "wide strides", "one"]
)
def test_an_order_without_use_costs_nothing_more(order: list[int]) -> None:
    store = CountedStore()
    reader = MergedReads(store)
    for _ in range(2):
        assert [reader[i] for i in order] == [10 * i for i in order]
    assert store.requests == store.examples == 2 * len(order)


def test_a_pattern_that_ends_costs_a_few_ranges_in_vain() -> None:
    store = CountedStore()
    reader = MergedReads(store)
    order = [*range(1024), *shuffled(seed=4)[:500]]
    assert [reader[i] for i in order] == [10 * i for i in order]
    assert store.examples <= len(order) + 5 * RANGE
    assert reader[-1] == 10 * (COUNT - 1)
    with pytest.raises(IndexError):
        reader[COUNT]


runs = st.one_of(
    st.builds(
        lambda start, step, n: [(start + step * k) % 200 for k in range(n)],
        *(st.integers(0, 199), st.integers(-9, 9), st.integers(1, 60)),
    ),
    st.lists(st.integers(0, 199), max_size=40),
    st.builds(lambda size, seed: blocks(size, 200, seed), st.integers(2, 60), st.integers(0, 9)),
)


@given(st.lists(runs, max_size=5))
def test_any_mixture_of_orders_gives_the_records_asked_for(pieces: list[list[int]]) -> None:
    order = [i for piece in pieces for i in piece]
    store = CountedStore(200)
    reader = MergedReads(store)
    assert [reader[i] for i in order] == [10 * i for i in order]
    assert store.requests <= len(order)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_behind_the_prefetcher_gives_the_same_batches_for_fewer_requests(
    shuffle: bool,
) -> None:
    def run(pattern_detection: bool | None) -> tuple[list[Any], int]:
        torch.manual_seed(1)
        store = CountedStore(1000)
        loader: Any = DataLoader(store, batch_size=8, shuffle=shuffle)
        if pattern_detection is not None:
            loader = SmartPrefetcher(4, pattern_detection).wrap(loader)
            assert len(loader) == 125
        return [x for b in loader for x in (b.tolist(), float(torch.rand(1)))], store.requests

    plain, plainly = run(None)
    detected, requests = run(True)
    undetected, others = run(False)
    assert detected == undetected == plain
    assert others == plainly == 1000
    assert requests == 1000 if shuffle else requests <= 200


def test_a_loader_that_can_not_gain_stays_the_loader_it_is() -> None:
    class FetchesBatches(CountedStore):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * i for i in indices]

    loaders: list[Any] = [
        DataLoader(torch.arange(8)),  # type: ignore[arg-type]
        DataLoader(CountedStore(8), batch_size=None),
        DataLoader(CountedStore(8), num_workers=1),
        DataLoader(FetchesBatches(8), batch_size=2),
        [1, 2, 3],
    ]
    assert all(with_merged_reads(loader) is loader for loader in loaders)
