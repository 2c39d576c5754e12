"""What a rank's collectives send is counted when they are issued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from netlab.counting import CollectiveBytes, counting

ME, WORLD = 1, 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Rank 1 of 4, with nobody there: torch's group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=ME, world_size=WORLD)
    yield
    dist.destroy_process_group()


def test_unequal_pieces_go_to_whom_they_are_for() -> None:
    with CollectiveBytes() as counted:
        dist.all_to_all_single(torch.empty(8), torch.empty(10), [2] * 4, [1, 2, 3, 4])
    assert dict(counted.to) == {0: 4, 2: 12, 3: 16}


def test_a_group_of_some_ranks_is_a_ring_of_its_own() -> None:
    pair = dist.new_group([1, 3])
    with CollectiveBytes() as counted:
        dist.all_reduce(torch.ones(10), group=pair)
        dist.broadcast(torch.ones(10), 3, group=pair)  # the other one sends
    assert dict(counted.to) == {3: 40}


def test_the_lab_hears_of_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_NETLAB_COUNTS", str(tmp_path))
    for _ in range(2):
        with counting():
            dist.all_reduce(torch.ones(8))
    noted = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert noted == [{"rank": 1, "to": {"2": 48.0}}] * 2


def test_a_count_that_cannot_be_complete_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_NETLAB_COUNTS", str(tmp_path))

    def scattered() -> None:
        with counting():
            dist.barrier()
            dist.scatter(torch.empty(4), src=0)

    with pytest.raises(ValueError, match="no count of scatter: use namespaces"):
        scattered()
    assert list(tmp_path.iterdir()) == []
