"""How a failed exchange is told once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hasten.parts.comm.rank_check import RankReports, of_an_exchange

GLOO = "[third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_failure_is_told_once_and_what_follows_from_it_alike(alone: None) -> None:
    calls = RankReports("tests", [0], 1.0)
    first = calls.failed("a sum", ArithmeticError("no such codes"))
    assert str(first) == "a sum failed on rank 0: no such codes"
    assert calls.failed("another sum", RuntimeError(GLOO)) is first


def test_who_never_met_is_missing(alone: None) -> None:
    found = RankReports("tests", [0, 3], 0.1).failed("a sum", RuntimeError(GLOO))
    assert found.missing == (3,)
    assert "rank 3 (never met) did not answer within 0.1 s" in str(found)


def test_only_errors_between_ranks_call_the_roll() -> None:
    assert of_an_exchange(RuntimeError(GLOO))
    assert of_an_exchange(dist.DistBackendError("NCCL error"))
    assert not of_an_exchange(RuntimeError("shapes don't fit"))
    assert not of_an_exchange(KeyError("weight"))
