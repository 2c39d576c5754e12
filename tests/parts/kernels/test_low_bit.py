"""Rounding to few bits: neighbours, means, and bounds of the error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.low_bit import (
    BLOCK,
    borders_below,
    noise,
    quantised_signed,
    quantised_squares,
    signed_table,
    squared_table,
    to_bf16,
    values_of,
)

CPU = torch.device("cpu")
LARGEST = 2.0**100
floats = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=False)
flat = st.lists(floats, min_size=1, max_size=600).map(torch.tensor)


def dice(count: int, seed: int = 0) -> Tensor:
    return noise(count, torch.Generator().manual_seed(seed))


def signed_again(values: Tensor) -> Tensor:
    return values_of(*quantised_signed(values), signed_table(CPU), len(values))


def squares_again(values: Tensor, seed: int = 0) -> Tensor:
    places, scales = quantised_squares(values, dice(len(values), seed))
    return values_of(places, scales, squared_table(CPU), len(values))


def per_block(values: Tensor) -> Tensor:
    """The largest of each value's block, beside the value."""
    return torch.cat([b.abs().max().expand(len(b)) for b in values.split(BLOCK)])


def test_noise_is_uniform_and_the_seed_decides_it() -> None:
    drawn = dice(1 << 18)
    assert drawn.dtype is torch.int32
    assert 0 <= int(drawn.min()) <= int(drawn.max()) <= 65535
    counts = torch.bincount(drawn >> 12, minlength=16).double()
    expected = (1 << 18) / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # chi-square, 15 degrees
    assert torch.equal(drawn, dice(1 << 18))
    assert not torch.equal(drawn, dice(1 << 18, seed=1))
    assert len(dice(5)) == 5


@given(flat)
def test_bf16_rounding_goes_to_one_of_the_two_neighbours(values: Tensor) -> None:
    rounded = to_bf16(values, dice(len(values))).float()
    step = (values.abs() * 2**-7).clamp_min(2.0**-133)
    assert bool(((rounded - values).abs() < step).all())
    assert bool((rounded * values >= 0).all())


@pytest.mark.parametrize("value", [1.001, -3.0001, 0.1, 1e-20])
def test_bf16_rounding_is_right_in_the_mean(value: float) -> None:
    values = torch.full((1 << 16,), value)
    rounded = to_bf16(values, dice(1 << 16)).double()
    spread = float(rounded.std()) / 2**8
    assert abs(float(rounded.mean()) - float(values[0])) < 5 * spread + 1e-30


def test_the_tables_are_sorted_have_256_values_and_end_at_one() -> None:
    for table in (signed_table(CPU), squared_table(CPU)):
        assert len(table) == 256
        assert bool((table.diff() > 0).all())
        assert float(table[-1]) == 1
        assert 0.0 in table
    assert float(squared_table(CPU)[1]) < 1.1e-13  # what a second moment needs to reach


@given(flat)
def test_8_bits_err_by_half_a_step_of_the_table_at_most(values: Tensor) -> None:
    error = (signed_again(values) - values).abs()
    widest = float(signed_table(CPU).diff().max())
    assert bool((error <= per_block(values) * widest * 0.5001).all())


@given(flat)
def test_zeros_stay_zero_and_scales_are_exact(values: Tensor) -> None:
    values[::2] = 0
    assert not signed_again(values)[::2].any()
    assert not squares_again(values.square().clamp_max(LARGEST))[::2].any()
    assert torch.equal(
        quantised_signed(values)[1], torch.stack([b.abs().max() for b in values.split(BLOCK)])
    )


@given(flat, st.integers(0, 5))
def test_a_second_moment_goes_to_a_neighbour_and_never_to_zero(values: Tensor, seed: int) -> None:
    moments = (values.abs() * 1e-15).square()
    again = squares_again(moments, seed)
    largest = per_block(moments)
    normal = largest > 1e-25
    assert bool((again[normal & (moments > largest * 1e-12)] > 0).all())
    table = squared_table(CPU).double()
    shares = (moments.double() / largest.double())[normal].clamp(max=1)
    above = torch.searchsorted(table, shares).clamp(1, 255)
    gap = (table[above] - table[above - 1]) * largest[normal].double()
    error = (again.double() - moments.double()).abs()[normal]
    assert bool((error <= gap * 1.001 + largest[normal] * 1e-6).all())


@pytest.mark.parametrize("share", [0.9, 0.3, 0.011, 1e-5, 3e-9])
def test_second_moments_are_right_in_the_mean(share: float) -> None:
    values = torch.full((1 << 16,), share)
    values[::BLOCK] = 1.0
    again = squares_again(values).double().view(-1, BLOCK)[:, 1:]
    spread = float(again.std()) / 2**8
    assert abs(float(again.mean()) - share) < 5 * spread + 1e-6 * share


@given(st.lists(st.floats(-1, 1, width=32, allow_subnormal=False), min_size=1, max_size=300))
def test_the_fast_search_finds_what_a_binary_search_finds(shares: list[float]) -> None:
    signed, squared = signed_table(CPU), squared_table(CPU)
    middles = (signed[1:] + signed[:-1]) / 2
    edges = torch.cat([middles, signed, squared])
    beside = [edges.nextafter(torch.tensor(v)) for v in (-2.0, 2.0)]
    values = torch.cat([torch.tensor(shares), edges, *beside])
    for kind, borders in (("signed", middles), ("squared", squared)):
        usual = values if kind == "signed" else values.abs()
        found = borders_below(usual, borders, low_bit._starts(kind, CPU))
        assert torch.equal(found.long(), torch.bucketize(usual, borders))
