"""The codecs in torch's operators, as reference: every kernel must write the same bits.

This runs if there is no compiler, and is the reference in tests of the C++ and Triton
kernels. Numbers are cut into blocks with one scale each. The scale is the block's
largest magnitude over the largest code, rounded up to bf16 so that no code overflows. A
code times a scale has at most 15 bits and is exact in float32. So every device decodes
the same number, with or without fused products and sums.

Scales have two limits, so that nothing overflows. A block with all numbers below about
2^-100 is sent as zero, because 1 / scale would overflow. A scale has an upper bound, so
the product with the largest code is finite. A block with an infinity or a NaN has NaN as
its scale and codes of zero. So it decodes to NaN on every rank.

Codes of one bit mark negative numbers. The scale is the mean magnitude, which minimises
the squared error. The rounding of a sum depends on its order, so it is fixed. There
are ``LANES`` sums, each of every ``LANES``-th number, which are added in pairs. Numbers
from 2^115 on count as infinite there, so no sum of a block overflows.

Stochastic rounding adds 16 bits of noise to a code in 65536ths and rounds down. Its mean
is the exact number. The noise is a hash of the number's position and the seed, the same
on every device. It repeats after 2^32 numbers.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

INFINITE = 0x7F800000  # bits of the float32 magnitude from which numbers are infinite or NaN
TOO_LARGE_FOR_BF16 = 0x7F7F8000  # bits of the float32 magnitude from which bf16 is infinite
NOT_A_NUMBER = 0x7FC0  # in bf16
LOWEST_SCALE = -100  # binary logarithm of the lowest scale
LANES = 16
SUMMED = (115 + 127) << 23  # 2^115: below it, a block of the largest size has a finite sum
CHUNK = 256  # numbers of a chunk with k values: an index is one byte
_Whole = TypeVar("_Whole", int, Tensor)


@dataclass(frozen=True)
class ScaleRule:
    """Constants for computing a block's scale from its largest magnitude."""

    share: float  # 1 / the largest code, as a float32
    low: int  # bits of the magnitude below which a block is sent as zero
    cap: int  # bits of the largest scale, in bf16
    most: int  # the largest code


@functools.cache
def rule_of(bits: int) -> ScaleRule:
    """Returns the rule for codes of so many bits."""
    most = 2 ** (bits - 1) - 1
    largest = torch.finfo(torch.float32).max
    low = _bits(math.ldexp(most, LOWEST_SCALE))
    return ScaleRule(_float32(1 / most), low, _bits(largest / most) >> 16, most)


def limit_of(bits: int) -> int:
    """Returns the bits of the magnitude from which a number counts as infinite."""
    return SUMMED if bits == 1 else INFINITE


def _float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _bits(number: float) -> int:
    """Returns the bits of the float32 at or below a positive number."""
    bits = int(struct.unpack("i", struct.pack("f", number))[0])
    return bits - (_float32(number) > number)


def key_of(seed: int) -> int:
    """Returns 32 mixed bits of a seed, so that neighbouring seeds have unrelated noise."""
    upper = mixed(((seed >> 32) + 0x9E3779B9) & 0xFFFFFFFF)
    return int(mixed((seed ^ upper) & 0xFFFFFFFF))


def mixed(x: _Whole) -> _Whole:
    """Computes hash "lowbias32" (Wellons, Prospecting for Hash Functions, nullprogram.com, 2018).

    A tensor is int64: its products wrap, and the lower 32 bits are then right.
    """
    x = x ^ x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def finite(flat: Tensor, residual: Tensor | None, limit: int) -> bool:
    """Returns True if all of ``flat + residual`` are below ``limit`` in magnitude.

    Waits for a GPU.
    """
    largest = _magnitudes(_sums(flat, residual)).amax()
    return int(largest) < limit  # reading the number waits


def encode(
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    block: int,
    bits: int,
    seed: int | None,
) -> None:
    """Encodes ``flat + residual`` into ``codes`` (uint8) and ``scales`` (int16, bits of a bf16).

    ``residual_out`` gets the error of the message; in a block that isn't finite, the unchanged
    residual. It may be the same tensor as ``residual``.
    """
    sums, blocks = _sums(flat, residual), len(scales)
    rows = F.pad(sums, (0, blocks * block - len(flat))).view(blocks, block)
    largest = _magnitudes(rows).amax(1)
    bad = largest >= limit_of(bits)
    good = torch.where(bad[:, None], 0.0, rows)
    if bits == 1:
        scale_bits, places = _signs(good, bad, len(flat), codes)
    else:
        scale_bits, places = _codes(good, largest, bad, codes, bits, seed)
    scales.copy_(torch.where(bad, NOT_A_NUMBER, scale_bits))
    if residual_out is not None:
        scale = (scale_bits << 16).view(torch.float32)[:, None]
        remainder = (good - places.to(torch.float32) * scale).view(-1)[: len(flat)]
        before = sums if residual is None else residual
        residual_out.copy_(
            torch.where(bad.repeat_interleave(block)[: len(flat)], before, remainder)
        )


def _signs(good: Tensor, bad: Tensor, numbers: int, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales' bits, and 1 or -1 per number; bit k of the bytes is a block's eighth k."""
    blocks, block = good.shape
    lanes = good.abs().view(blocks, -1, LANES)
    total = lanes[:, 0].clone()
    for part in lanes.unbind(1)[1:]:
        total += part
    while total.shape[1] > 1:
        low, high = total.chunk(2, dim=1)
        total = low + high
    counts = total.new_full((blocks,), block)
    counts[-1] = numbers - block * (blocks - 1)
    scale_bits = torch.where(bad, 0, _bf16_bits(total[:, 0] / counts))
    negative = (good < 0) & ~bad[:, None]
    weights = (2 ** torch.arange(8, device=good.device)).to(torch.uint8)[None, :, None]
    bytes_ = (negative.view(blocks, 8, -1).to(torch.uint8) * weights).sum(1, dtype=torch.uint8)
    codes.copy_(bytes_.view(-1))
    return scale_bits, torch.where(negative, -1, 1)


def _codes(
    good: Tensor, largest: Tensor, bad: Tensor, codes: Tensor, bits: int, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Returns scales' bits, and the code of each number."""
    rule = rule_of(bits)
    share = (largest.view(torch.float32) * rule.share).view(torch.int32)
    scale_bits = ((share + 0xFFFF) >> 16).clamp_max(rule.cap)
    scale_bits = torch.where((largest < rule.low) | bad, 0, scale_bits)
    scale = (scale_bits << 16).view(torch.float32)[:, None]
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    places = _rounded(good, inverse, seed).clamp_(-rule.most, rule.most)
    if bits == 8:
        codes.copy_(places.to(torch.int8).view(torch.uint8).view(-1))
    else:
        low, high = (places & 15).to(torch.uint8).chunk(2, dim=1)
        codes.copy_((low | high << 4).view(-1))
    return scale_bits, places


def _rounded(rows: Tensor, inverse: Tensor, seed: int | None) -> Tensor:
    """Returns whole numbers as int32: to the nearest, ties to even, or at random."""
    if seed is None:
        return (rows * inverse).round_().to(torch.int32)
    places = torch.arange(rows.numel(), device=rows.device) + key_of(seed)
    noise = (mixed(places & 0xFFFFFFFF) >> 16).to(torch.int32).view(rows.shape)
    return ((rows * (inverse * 65536)).round_().to(torch.int32) + noise) >> 16


def decode(
    codes: Tensor, scales: Tensor, out: Tensor, block: int, bits: int, factor: float, add: bool
) -> None:
    """Sums the messages (ranks, ...) in their order, times ``factor``, into ``out``."""
    total: Tensor | None = None
    for code, scale in zip(codes, scales, strict=True):
        if bits == 8:
            places = code.view(torch.int8).view(-1, block)
        elif bits == 1:
            eighths = code.view(-1, 1, block // 8) >> torch.arange(8, device=out.device)[:, None]
            places = 1 - 2 * (eighths & 1).view(-1, block)
        else:
            nibbles = code.view(torch.int8).view(-1, block // 2)
            places = torch.cat([(nibbles << 4) >> 4, nibbles >> 4], dim=1)
        values = (
            places.to(torch.float32) * (scale.to(torch.int32) << 16).view(torch.float32)[:, None]
        )
        total = values if total is None else total.add_(values)
    if total is not None:
        _put(total.view(-1)[: len(out)], out, factor, add)


def topk_encode(
    flat: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    places: Tensor,
    sent: Tensor,
    k: int,
) -> None:
    """Writes the k largest of each chunk to ``places`` (uint8, ascending) and ``sent`` (int16).

    Of equal magnitudes the one at the lowest place is taken; NaN counts as larger than infinity.
    """
    sums, chunks = _sums(flat, residual), -(-len(flat) // CHUNK)
    rows = F.pad(sums, (0, chunks * CHUNK - len(flat))).view(chunks, CHUNK)
    sizes = _magnitudes(rows)
    falling = torch.arange(CHUNK - 1, -1, -1, device=flat.device)
    order = sizes.to(torch.int64) * CHUNK + falling  # no two are equal
    chosen = order.topk(k, dim=1).indices.sort(dim=1).values
    values = _bf16_bits(rows.gather(1, chosen))
    places.copy_(chosen.to(torch.uint8).view(-1))
    sent.copy_(values.view(-1))
    if residual_out is not None:
        back = (values << 16).view(torch.float32)
        remainder = rows.scatter(1, chosen, rows.gather(1, chosen) - back).view(-1)[: len(flat)]
        bad = (sizes.amax(1) >= TOO_LARGE_FOR_BF16).repeat_interleave(CHUNK)[: len(flat)]
        residual_out.copy_(torch.where(bad, sums if residual is None else residual, remainder))


def topk_decode(
    places: Tensor, sent: Tensor, out: Tensor, k: int, factor: float, add: bool
) -> None:
    """Sums the messages (ranks, ...) in their order, times ``factor``, into ``out``."""
    chunks = -(-len(out) // CHUNK)
    total = out.new_zeros(chunks, CHUNK)
    for chunk_places, value in zip(places, sent, strict=True):
        at = chunk_places.view(chunks, k).to(torch.int64)
        values = (value.to(torch.int32) << 16).view(torch.float32).view(chunks, k)
        total.scatter_(1, at, total.gather(1, at) + values)  # no index occurs twice
    _put(total.view(-1)[: len(out)], out, factor, add)


def _put(total: Tensor, out: Tensor, factor: float, add: bool) -> None:
    if add:
        out.add_(total)
    else:
        torch.mul(total, factor, out=out)


def _sums(flat: Tensor, residual: Tensor | None) -> Tensor:
    wide = flat.to(torch.float32)
    return wide if residual is None else wide + residual


def _magnitudes(values: Tensor) -> Tensor:
    """Returns bits without the sign, as int32: ordered as magnitudes."""
    return values.view(torch.int32) & 0x7FFFFFFF


def _bf16_bits(values: Tensor) -> Tensor:
    """Returns the nearest bf16, ties to even, as int32; every NaN becomes the same one."""
    bits = values.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(values.isnan(), NOT_A_NUMBER, rounded)
