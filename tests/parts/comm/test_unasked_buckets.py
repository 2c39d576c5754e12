"""Buckets whose numbers the host doesn't look at, as on a GPU: the same means and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.parts.comm import methods
from hasten.parts.comm.buckets import BucketExchange
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.comm.methods import BucketPart

PIECES = (BucketPart("a", (64, 64)), BucketPart("unused", (32, 64)), BucketPart("b", (100,)))
COMMUNICATIONS = ("none", "half", "int8", "int4", "topk", "powersgd")


class OneRank:
    """Ranks of which there is one: what it sends comes back."""

    rank, world = 0, 1

    class Pending:
        def __init__(self, values: Tensor) -> None:
            self._values = values

        def wait(self) -> Tensor:
            return self._values

    def all_reduce(self, values: Tensor, stage: int) -> Pending:
        return self.Pending(values)

    def all_gather(self, row: Tensor, stage: int) -> Pending:
        return self.Pending(row[None])

    def all_to_all(self, rows: Tensor) -> Pending:
        return self.Pending(rows.clone())


def gradients(step: int) -> Tensor:
    flat = torch.randn(
        sum(p.numbers for p in PIECES), generator=torch.Generator().manual_seed(step)
    )
    flat[64 * 64 : 64 * 64 + 32 * 64] *= step % 2  # in every other step nobody uses this one
    return flat


def exchanged(method: str, bad: int | None, steps: int = 5) -> tuple[list[Tensor], Any]:
    """The means of some steps, one of which may have an infinite number; and the memory left."""
    travel = BucketExchange(CompressionSettings(method=method, minimum=0))
    found = []
    ranks: Any = OneRank()
    for step in range(steps):
        travel.begin()
        flat = gradients(step)
        if step == bad:
            flat[7] = torch.inf
        found.append(travel.send(flat, PIECES, ranks, travel.way)())
    return found, travel.state()


@pytest.mark.parametrize("method", COMMUNICATIONS)
@pytest.mark.parametrize("bad", [None, 2])
def test_what_is_not_looked_at_comes_out_the_same(
    method: str, bad: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, asked_memory = exchanged(method, bad)
    monkeypatch.setattr(methods, "may_ask", lambda tensor: False)
    found, memory = exchanged(method, bad)
    for step, (one, other) in enumerate(zip(asked, found, strict=True)):
        if step == bad:
            assert not other.isfinite().all(), "the step must not count"
        else:
            assert torch.equal(one, other)
    assert memory["steps"] == asked_memory["steps"]
    for name, values in asked_memory["residual"].items():
        assert torch.equal(values, memory["residual"][name]), name
