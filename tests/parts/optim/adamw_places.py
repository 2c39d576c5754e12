"""The places that the kernel of AdamW gives numbers in the tables of 8 bits, alone.

Imported only where Triton is installed.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.adamw_triton import signed_places, squared_places


@triton.jit
def places_kernel(
    shares,
    dice,
    borders,
    signed_starts,
    squared,
    squared_starts,
    first,
    second,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(shares + at)
    tl.store(first + at, signed_places(share, borders, signed_starts))
    chance = tl.load(dice + at)
    tl.store(second + at, squared_places(tl.abs(share), squared, squared_starts, chance))


def places(shares: Tensor, dice: Tensor) -> tuple[Tensor, Tensor]:
    """Of shares from -1 to 1 as first moments, and of their sizes as second ones."""
    first, second = (torch.empty_like(dice) for _ in range(2))
    tables = low_bit.tables(shares.device)[1:]
    places_kernel[(len(shares) // 1024,)](shares, dice, *tables, first, second, BLOCK=1024)
    return first, second
