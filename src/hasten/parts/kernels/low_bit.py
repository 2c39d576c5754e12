"""Numbers in few bits: rounding that keeps the mean, and numbers of 8 bits in blocks.

bf16 has 8 bits of mantissa. So a running mean that moves by less than 1/256 of itself
per step doesn't change under rounding to the nearest. Rounded up or down at random, in
proportion to the distance, it is right in the mean. Source: Gupta et al., Deep Learning
with Limited Numerical Precision, arXiv:1502.02551.

8 bits follow Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861. 256 values share one float32 scale, their largest. Each value is an
index in a fixed table, with steps that are fine near 1 and coarse near 0. Two things
differ from the paper:

- The table of second moments is squared, because they are squares. It goes down to
  1e-13 of the largest instead of 3e-7.
- Second moments are rounded at random, because at beta2 = 0.999 they move less per step
  than the table's steps.

The noise comes from the caller, so seed and step determine every rounding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values that share a scale
TINY = torch.finfo(torch.float32).tiny
DECADES = 7  # decades that a table covers below 1


def noise(count: int, generator: torch.Generator) -> Tensor:
    """Returns ``count`` whole numbers from 0 to 65535 as int32, four from each drawn word."""
    drawn = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[:count].to(torch.int32) & 0xFFFF


def to_bf16(values: Tensor, dice: Tensor) -> Tensor:
    """Rounds float32 to one of its two bf16 neighbours, right in the mean.

    The lower 16 bits are the distance to the neighbour below, in 65536ths of the gap.
    """
    bits = values.contiguous().view(torch.int32) + dice
    rounded = (bits & -65536).view(torch.float32).to(torch.bfloat16)
    if values.device.type != "cpu":
        # A GPU's NaN is 0x7FFFFFFF, which a sum turns into zero; a processor's is 0x7FC00000.
        rounded.masked_fill_(values.isnan(), torch.nan)
    return rounded


@functools.cache
def signed_table(device: torch.device) -> Tensor:
    """Returns 256 values from -1 to 1 with 0: 2^i midpoints of the i-th decade on either side."""
    half = [v for i in range(DECADES) for v in _midpoints(i, 2**i)]
    return torch.tensor(sorted([0.0, 1.0, *half, *(-v for v in half)]), device=device)


@functools.cache
def squared_table(device: torch.device) -> Tensor:
    """Returns 256 values from 0 to 1: the squares of 2^(i+1) midpoints of the i-th decade."""
    half = [v for i in range(DECADES) for v in _midpoints(i, 2 ** (i + 1))]
    return torch.tensor(sorted([0.0, 1.0, *(v * v for v in half)]), device=device)


@functools.cache
def signed_borders(device: torch.device) -> Tensor:
    """Returns the 255 numbers halfway between neighbours of the table of first moments."""
    table = signed_table(device)
    return (table[1:] + table[:-1]) / 2


def _midpoints(decade: int, count: int) -> list[float]:
    scale = 10.0 ** (decade - DECADES + 1)
    width = 0.9 / count
    return [scale * (0.1 + width * (i + 0.5)) for i in range(count)]


def blocks(count: int) -> int:
    """Returns the number of blocks for so many values; the last may be partly empty."""
    return -(-count // BLOCK)


def quantised_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (indices in the table as uint8, a scale per block) of flat float32 values."""
    shares, scales = _shares(values)
    borders = signed_borders(values.device)
    return borders_below(shares, borders, _starts("signed", values.device)).to(torch.uint8), scales


def quantised_squares(values: Tensor, dice: Tensor) -> tuple[Tensor, Tensor]:
    """Returns indices and scales of values that aren't negative, rounded at random.

    A value that isn't 0 is never stored as 0: its square root is what a step is divided by.
    """
    table = squared_table(values.device)
    shares, scales = _shares(values)
    above = borders_below(shares, table, _starts("squared", values.device)).clamp_(1, 255)
    low, high = table.index_select(0, above - 1), table.index_select(0, above)
    flat = shares.flatten()
    chance = (flat - low) / (high - low) * 65536
    dice = _in_whole_blocks(dice)
    places = above - 1 + (dice < chance)
    return torch.maximum(places, flat > 0).to(torch.uint8), scales


def borders_below(shares: Tensor, borders: Tensor, starts: Tensor) -> Tensor:
    """Counts the sorted borders below each value, flat, 20 times faster than a binary search.

    A number's upper 16 bits give the count below the smallest number with these bits. No
    two borders of the tables share their upper bits, so one comparison completes the count.
    """
    flat = shares.flatten()
    start = starts.index_select(0, (flat.view(torch.int32) >> 16) & 0xFFFF)
    following = F.pad(borders, (0, 1), value=torch.inf).index_select(0, start)
    return start + (following < flat)


@functools.cache
def _starts(kind: str, device: torch.device) -> Tensor:
    """Returns the borders below the smallest float32 with each upper half."""
    cpu = torch.device("cpu")
    borders = signed_borders(cpu) if kind == "signed" else squared_table(cpu)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(2**15) << 16
    smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    positions = torch.searchsorted(borders, smallest.nan_to_num(2.0))
    return positions.to(torch.int32).to(device)


class Tables(NamedTuple):
    """8-bit tables for a kernel: values, borders, and starts of :func:`borders_below`."""

    signed: Tensor  # (256,) float32
    borders: Tensor  # (256,), the last is infinite
    signed_starts: Tensor  # (65536,) uint8
    squared: Tensor
    squared_starts: Tensor


@functools.cache
def tables(device: torch.device) -> Tables:
    """Returns the tables on a device, made once."""
    return Tables(
        signed_table(device),
        F.pad(signed_borders(device), (0, 1), value=torch.inf),
        _starts("signed", device).to(torch.uint8),
        squared_table(device),
        _starts("squared", device).clamp_max(255).to(torch.uint8),
    )


def values_of(places: Tensor, scales: Tensor, table: Tensor, count: int) -> Tensor:
    """Decodes the first ``count`` values from places and scales, flat, float32."""
    scaled = table.index_select(0, places.to(torch.int32)).view(-1, BLOCK) * scales[:, None]
    return scaled.flatten()[:count]


def _in_whole_blocks(values: Tensor) -> Tensor:
    """Pads with zeros to whole blocks; returns the same tensor if none is missing."""
    missing = -len(values) % BLOCK
    return F.pad(values, (0, missing)) if missing else values


def _shares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns values as shares of their block's largest, (blocks, 256), and these largest."""
    rows = _in_whole_blocks(values).view(-1, BLOCK)
    scales = rows.abs().amax(1)
    return rows / scales.clamp_min(TINY)[:, None], scales
