"""Messages in pieces, against broadcasts of whole ones."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm import groups
from ranks import on_ranks, once_on_ranks

PIECE = 96  # bytes
COUNTS = (0, 1, 7, 23, 24, 25, 48, 49, 1000)  # numbers for one rank
DTYPES = (torch.uint8, torch.float32, torch.float64)


def all_sizes(_: Any) -> list[dict[str, Any]]:
    """Of every size and format: what travelled, in pieces, and by torch's own lists."""
    groups.PIECE = PIECE
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    group = dist.new_group()
    for dtype in DTYPES:
        for count in COUNTS:
            torch.manual_seed(100 * rank + count)
            rows = torch.randint(0, 250, (world, count)).to(dtype)
            every, received = torch.empty_like(rows), torch.empty_like(rows)
            calls = Counted()
            into = every if count % 2 else every.view(-1)
            gathered = groups.all_gather(into, rows[rank].clone(), group)
            exchanged = groups.all_to_all(received, rows, group)
            said: list[int] = []
            gathered.on_arrival(lambda said=said: said.append(1))  # type: ignore[misc]
            gathered.wait()
            exchanged.wait()
            issued = calls.stop()
            dist.barrier(group)
            found.append(
                {
                    "pieces": pieces(count, rows.element_size()),
                    "issued": issued,
                    "told": len(said),
                    "gathered": torch.equal(every, plain_gather(rows[rank], group)),
                    "exchanged": torch.equal(received, plain_exchange(rows, group)),
                }
            )
    return found


def pieces(count: int, size: int) -> int:
    """Of so many numbers in pieces of 96 bytes, eight at most."""
    return min(8, max(1, -(-count * size // PIECE)))


def lost_rank(_: Any) -> str:
    """The last rank leaves; what the others are told of a message in pieces."""
    groups.PIECE = PIECE
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    world = dist.get_world_size()
    if dist.get_rank() == world - 1:
        return "left"
    rows = torch.zeros(world, 1000)
    try:
        groups.all_to_all(torch.empty_like(rows), rows, group).wait()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


class Counted:
    """How many collectives are issued meanwhile, by name."""

    NAMES = ("all_gather", "all_to_all_single")

    def __init__(self) -> None:
        self.count = dict.fromkeys(self.NAMES, 0)
        self._own = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self._counting(name))

    def _counting(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.count[name] += 1
            return self._own[name](*arguments, **named)

        return call

    def stop(self) -> dict[str, int]:
        for name, function in self._own.items():
            setattr(dist, name, function)
        return self.count


def plain_gather(row: Tensor, group: Any) -> Tensor:
    """By broadcasts."""
    rows = []
    for giver in range(dist.get_world_size(group)):
        found = row.clone()
        dist.broadcast(found, giver, group=group)
        rows.append(found)
    return torch.stack(rows)


def plain_exchange(rows: Tensor, group: Any) -> Tensor:
    """Everybody has everything, and takes its own of it."""
    own = dist.get_rank(group)
    everything = plain_gather(rows, group)
    return everything[:, own].contiguous()


WORLD = 3


found = once_on_ranks(all_sizes, WORLD)


def test_every_size_arrives_as_it_was_sent(found: list[Any]) -> None:
    assert len(found) == WORLD
    for rank in found:
        assert len(rank) == len(DTYPES) * len(COUNTS)
        assert all(case["gathered"] and case["exchanged"] for case in rank)


def test_only_what_is_longer_than_a_piece_is_cut(found: list[Any]) -> None:
    for case in (case for rank in found for case in rank):
        cut = case["pieces"] > 1
        assert case["issued"]["all_to_all_single"] == case["pieces"]
        assert case["issued"]["all_gather"] == (case["pieces"] if cut else 0)
    assert {1, 2, 3, 8} <= {case["pieces"] for case in found[0]}


def test_the_arrival_of_the_last_piece_is_told_once(found: list[Any]) -> None:
    assert {case["told"] for rank in found for case in rank} == {1}


def test_a_rank_that_has_left_is_an_error(tmp_path: Path) -> None:
    assert on_ranks(lost_rank, tmp_path, 2) == [
        "RuntimeError",
        "left",
    ]
