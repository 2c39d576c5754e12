"""A checksum of weights sees every change; a failed exchange is told once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.comm.rank_check import (
    NAMED,
    WORDS,
    RankReports,
    _place,
    checksum,
    of_an_exchange,
)

FORMATS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def weights(numbers: int, dtype: torch.dtype) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(numbers)
    return [torch.randn(numbers, generator=dice).to(dtype), torch.zeros(3, dtype=dtype)]


@given(st.integers(1, 3000), FORMATS, st.data())
def test_one_flipped_bit_shows(numbers: int, dtype: torch.dtype, data: st.DataObject) -> None:
    found = weights(numbers, dtype)
    before = checksum(found)
    assert before == checksum(weights(numbers, dtype))
    assert 0 <= before < 2**63
    place = data.draw(st.integers(0, numbers - 1))
    bits = 8 * found[0].element_size()
    bit = data.draw(st.integers(0, bits - 1))
    mask = -(1 << bit) if bit == bits - 1 else 1 << bit  # the highest is a sign
    found[0].view(WORDS[found[0].element_size()])[place] ^= mask
    assert checksum(found) != before


@given(st.integers(2, 3000), st.data())
def test_two_weights_that_change_places_show(numbers: int, data: st.DataObject) -> None:
    values = torch.arange(float(numbers))
    one, other = (data.draw(st.integers(0, numbers - 1)) for _ in range(2))
    changed = values.clone()
    changed[one], changed[other] = values[other], values[one]
    assert (checksum([values]) == checksum([changed])) == (one == other)


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


def test_a_rank_that_fails_after_others_have_waited_does_not_wait_again(alone: None) -> None:
    late = RankReports("tests", [0, 3], 9.0)
    _place(late._subject).set(NAMED, "")  # by a rank whose wait is over
    began = time.monotonic()
    assert late.failed("a sum", RuntimeError(GLOO)).missing == (3,)
    assert time.monotonic() - began < 5


def test_only_errors_between_ranks_call_the_roll() -> None:
    assert of_an_exchange(RuntimeError(GLOO))
    assert of_an_exchange(dist.DistBackendError("NCCL error"))
    assert not of_an_exchange(RuntimeError("shapes don't fit"))
    assert not of_an_exchange(KeyError("weight"))
