"""Sampling by budget, packing, adaptive cuts, worker processes and reading ahead lose no
example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hasten.parts.data import collate
from hasten.parts.data.dynamic_batch import DynamicBatcher, DynamicBatchSampler
from hasten.parts.data.epoch_order import PackedOrder
from hasten.parts.data.prefetch import SmartPrefetcher
from ranks import on_ranks

COUNT = 100_000
LENGTHS = np.random.default_rng(0).integers(1, 513, COUNT)


class Ids(Dataset[int]):
    """Examples that are their own number."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def as_tensor(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids)


def seen_by(rank: int, world: int, workers: int, epoch: int) -> torch.Tensor:
    """A rank's examples: budget sampler, workers, read ahead, cut to what the memory allows."""
    sampler = DynamicBatchSampler(
        Ids(), 65_536, lengths=LENGTHS.tolist(), rank=rank, world_size=world
    )
    sampler.set_epoch(epoch)
    loader = DataLoader(Ids(), batch_sampler=sampler, num_workers=workers, collate_fn=as_tensor)
    used = iter(np.random.default_rng(rank).random(10 * COUNT))  # a memory that swings
    batcher = DynamicBatcher(16, 2_048, meter=lambda: (next(used), 1.0))
    found = []
    for batch in batcher.batches(SmartPrefetcher(4).wrap(loader)):
        found.append(batch)
        batcher.update_after_step()
        if len(found) % 17 == 0:
            batcher.on_out_of_memory()
    assert len(set(map(len, found))) > 3  # the size did move
    return torch.cat(found)


def each_once(parts: Sequence[torch.Tensor]) -> bool:
    together = torch.cat(list(parts)).sort().values
    return torch.equal(together, torch.arange(COUNT))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 2), (4, 0)])
def test_every_record_comes_once_an_epoch_over_all_ranks(world: int, workers: int) -> None:
    first = [seen_by(rank, world, workers, 0) for rank in range(world)]
    assert each_once(first)
    if workers == 0:
        second = [seen_by(rank, world, workers, 1) for rank in range(world)]
        assert each_once(second)
        assert not torch.equal(first[0][:100], second[0][:100])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_packed_over_the_epoch_and_cut_by_memory_hold_every_record_once(world: int) -> None:
    order = PackedOrder(LENGTHS.tolist(), 4096, 8 * world, 0, 0.1)
    limits = np.random.default_rng(1)

    def pieces(rank: int) -> Iterator[list[int]]:
        for step in order.local_steps(0, rank, world):
            limit = int(limits.integers(512, 8192))
            for row in step:
                yield from collate.by_positions(row, [int(LENGTHS[i]) for i in row], limit)

    read: list[torch.Tensor] = []
    for rank in range(world):
        ahead = SmartPrefetcher(4).wrap(as_tensor(piece) for piece in pieces(rank))
        read += list(ahead)
    assert each_once(read)


def on_this_rank(world: Any) -> dict[str, Any]:
    """A rank of its own: what it saw, agreed on with the others as a sum, and its order twice."""
    mine = seen_by(world.rank, world.size, 1, 0)
    counts = torch.zeros(COUNT, dtype=torch.int32)
    counts.index_add_(0, mine, torch.ones(len(mine), dtype=torch.int32))
    torch.distributed.all_reduce(counts)
    again = seen_by(world.rank, world.size, 0, 0)
    return {"once": bool((counts == 1).all()), "same order": torch.equal(mine, again)}


def test_two_processes_see_every_record_once_and_workers_change_no_order(tmp_path: Path) -> None:
    found = on_ranks("articles.test_every_record_once:on_this_rank", tmp_path)
    assert found == [{"once": True, "same order": True}] * 2, json.dumps(found)
