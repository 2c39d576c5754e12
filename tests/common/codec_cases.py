"""Numbers that codecs find hard, and the messages of int8, int4 and sign read byte by byte."""

from __future__ import annotations

import struct

import torch
from hypothesis import strategies as st
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-100, LARGEST, -LARGEST, 3.3e38, 65504.0)
BROKEN = (float("nan"), float("inf"), float("-inf"), -float("nan"))
finite_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
any_floats = finite_floats | st.sampled_from(SPECIAL + BROKEN)
SIZES = (1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000)


@st.composite
def cases(draw: st.DrawFn, broken: bool = True) -> Tensor:
    """Random numbers of a random size and scale, some of them replaced by special ones."""
    size = draw(st.sampled_from(SIZES) | st.integers(1, 1100))
    scale = draw(st.sampled_from([0.0, 1e-42, 1e-30, 1e-3, 1.0, 1e30]))
    spread = draw(st.sampled_from([0.0, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    spreads = (spread * torch.randn(size, generator=generator)).exp()
    numbers = (torch.randn(size, generator=generator) * spreads * scale).clamp(-LARGEST, LARGEST)
    some = any_floats if broken else finite_floats | st.sampled_from(SPECIAL)
    for place, number in draw(st.lists(st.tuples(st.integers(0, size - 1), some), max_size=4)):
        numbers[place] = number
    return numbers


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, but that one NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(7.0, 7.5, 8.5).view(torch.int32), b.nan_to_num(7.0, 7.5, 8.5).view(torch.int32)
    )


def read_by_hand(message: Tensor, numbers: int, bits: int, block: int) -> list[float]:
    """What the documented layout says, a byte at a time, in Python's own floats."""
    data = bytes(message.tolist())
    blocks = -(-numbers // block)
    size = blocks * block * bits // 8
    found = []
    for n in range(numbers):
        b, place = divmod(n, block)
        (scale_bits,) = struct.unpack_from("<H", data, size + 2 * b)
        (scale,) = struct.unpack("<f", struct.pack("<I", scale_bits << 16))
        if bits == 1:
            eighth = block // 8
            negative = data[b * eighth + place % eighth] >> place // eighth & 1
            found.append(-scale if negative else scale)
            continue
        if bits == 8:
            code = data[b * block + place]
        else:
            half = block // 2
            byte = data[b * half + place % half]
            code = byte >> 4 if place >= half else byte & 15
        code -= 2**bits if code >= 2 ** (bits - 1) else 0
        found.append(code * scale)
    return found
