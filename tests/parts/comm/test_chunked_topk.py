"""Top-k by chunks: which numbers travel, in what order, and what a choice costs in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import cases
from hasten.parts.comm.codecs import ChunkedTopK


def by_hand(flat: Tensor, k: int) -> list[tuple[int, float]]:
    """Sorted by magnitude, then by place; the k first of each chunk, as bf16."""
    found = []
    numbers = flat.tolist()
    for first in range(0, len(numbers), 256):
        places = range(first, min(first + 256, len(numbers)))
        best = sorted(places, key=lambda i: (-abs(numbers[i]), i))[:k]
        found += [(i, float(flat[i].bfloat16())) for i in best]
    return found


@settings(max_examples=60, deadline=None)
@given(flat=cases(broken=False), k=st.sampled_from([1, 2, 13, 100, 256]), ties=st.booleans())
def test_the_largest_travel_and_the_others_are_zero(flat: Tensor, k: int, ties: bool) -> None:
    flat = flat.clamp(-3e38, 3e38)
    if ties:
        flat = flat.sign()
    wanted = torch.zeros(len(flat))
    for place, value in by_hand(flat, k):
        wanted[place] = value
    communication = ChunkedTopK(k)
    assert torch.equal(communication.decode(communication.encode(flat), len(flat)), wanted)


def test_three_bytes_for_each_number_that_is_kept() -> None:
    assert ChunkedTopK(13).message_bytes(256 * 1600) == 3 * 13 * 1600
    assert ChunkedTopK(1).message_bytes(1) == 32  # one place and one value, each filled up to 16
    assert ChunkedTopK(13).message_bytes(257) == ChunkedTopK(13).message_bytes(512)


def test_a_share_keeps_at_least_that_many() -> None:
    assert ChunkedTopK.of_share(0.05).k == 13
    assert ChunkedTopK.of_share(1e-9).k == 1
    assert ChunkedTopK.of_share(1.0).k == 256


def test_places_are_sent_in_their_order() -> None:
    flat = torch.zeros(256)
    flat[[200, 7, 90]] = torch.tensor([1.0, -2.0, 3.0])
    assert ChunkedTopK(3).encode(flat)[:3].tolist() == [7, 90, 200]


def test_kept_entirely_only_the_rounding_stays_behind() -> None:
    flat, residual = torch.randn(600, generator=torch.Generator().manual_seed(0)), torch.zeros(600)
    ChunkedTopK(256).encode_with_feedback(flat, residual)
    assert torch.equal(residual, flat - flat.bfloat16().float())


@pytest.mark.parametrize("k", [0, 257, -1])
def test_a_number_of_kept_ones_beyond_a_chunk_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 256 numbers are kept, not {k}"):
        ChunkedTopK(k)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_beyond_all_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most 1"):
        ChunkedTopK.of_share(share)
