"""A checksum of weights: every flipped bit and every exchange of two weights changes it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.comm.rank_check import WORDS, checksum, drift_message

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


def test_the_ranks_that_differ_are_named() -> None:
    said = drift_message([1, 3], 7)
    assert "after step 7 the weights of rank 1, 3 are not those of rank 0" in said
