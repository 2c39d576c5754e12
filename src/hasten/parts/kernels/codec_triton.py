"""Codecs in Triton, for GPUs: the loops of ``codec.cpp`` again, bit by bit.

Imported only if Triton is installed. One program has one block. A product is never
fused with the sum that rounds it to a whole number. A fused one would round differently
if two codes are equally near. So the kernels are compiled without fusion.
:mod:`hasten.parts.kernels.codec_gpu` calls them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as its own: constexpr, or none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(x):
    """The hash of ``codec_reference``, on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def read(flat, residual, at, inside, REST: tl.constexpr):
    """Reads numbers and adds earlier errors."""
    values = tl.load(flat + at, mask=inside, other=0.0).to(tl.float32)
    if REST:
        values += tl.load(residual + at, mask=inside, other=0.0)
    return values


@triton.jit
def rounded(values, inverse, at, most, key, DICE: tl.constexpr):
    """Rounds codes to whole numbers: to the nearest, ties to even, or at random."""
    if DICE:
        fine = values * (inverse * 65536.0)
        # The addend below rounds numbers up to 2^22, but 65536ths of int8 reach 2^23.
        below = tl.floor(fine)
        share = fine - below
        odd = (below.to(tl.int32) & 1) == 1
        up = (share > 0.5) | ((share == 0.5) & odd)
        integers = below.to(tl.int32) + tl.where(up, 1, 0)
        noise = mixed((at.to(tl.int32) + key).to(tl.uint32)) >> 16
        codes = (integers + noise.to(tl.int32)) >> 16
    else:
        codes = ((values * inverse + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.minimum(tl.maximum(codes, -most), most)


@triton.jit(do_not_specialize=["key"])  # another one in each step
def encode_kernel(
    flat,
    residual,
    residual_out,
    codes,
    scales,
    numbers,
    share,
    low,
    cap,
    most,
    key,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    KEEP: tl.constexpr,
    DICE: tl.constexpr,
    INFINITY: tl.constexpr,
):
    """Encodes one block; in int4 its halves are in the two halves of each byte."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, HALF)
    first = block * 2 * HALF + lane
    second = first + HALF
    v = read(flat, residual, first, first < numbers, REST)
    w = read(flat, residual, second, second < numbers, REST)
    sizes = tl.maximum(
        v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    largest = tl.max(sizes, 0)
    bad = largest >= INFINITY
    up = ((largest.to(tl.float32, bitcast=True) * share).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where((largest < low) | bad, 0, tl.minimum(up, cap))
    scale = (bits << 16).to(tl.float32, bitcast=True)
    inverse = tl.where(bits > 0, tl.math.div_rn(1.0, tl.where(bits > 0, scale, 1.0)), 0.0)
    v = tl.where(bad, 0.0, v)
    w = tl.where(bad, 0.0, w)
    q = rounded(v, inverse, first, most, key, DICE)
    r = rounded(w, inverse, second, most, key, DICE)
    if BITS == 8:
        tl.store(codes + first, q.to(tl.int8))
        tl.store(codes + second, r.to(tl.int8))
    else:
        tl.store(codes + block * HALF + lane, ((q & 15) | ((r & 15) << 4)).to(tl.int8))
    tl.store(scales + block, tl.where(bad, 0x7FC0, bits).to(tl.int16))
    if KEEP:
        v = v - q.to(tl.float32) * scale
        w = w - r.to(tl.float32) * scale
        before = tl.load(residual + first, mask=first < numbers, other=0.0)
        after = tl.load(residual + second, mask=second < numbers, other=0.0)
        tl.store(residual_out + first, tl.where(bad, before, v), mask=first < numbers)
        tl.store(residual_out + second, tl.where(bad, after, w), mask=second < numbers)


@triton.jit
def decode_kernel(
    codes,
    scales,
    out,
    numbers,
    ranks,
    codes_stride,
    scales_stride,
    factor,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    ADD: tl.constexpr,
):
    """Decodes one block of all ranks' messages, summed in their order."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, HALF)
    first = block * 2 * HALF + lane
    second = first + HALF
    v = tl.zeros([HALF], dtype=tl.float32)
    w = tl.zeros([HALF], dtype=tl.float32)
    for _ in range(ranks):
        bits = tl.load(scales + block).to(tl.int32) << 16
        scale = bits.to(tl.float32, bitcast=True)
        if BITS == 8:
            q = tl.load(codes + first).to(tl.int32)
            r = tl.load(codes + second).to(tl.int32)
        else:
            both = tl.load(codes + block * HALF + lane).to(tl.int32)
            q = (both << 28) >> 28
            r = both >> 4
        v += q.to(tl.float32) * scale
        w += r.to(tl.float32) * scale
        codes += codes_stride
        scales += scales_stride
    if ADD:
        v += tl.load(out + first, mask=first < numbers, other=0.0)
        w += tl.load(out + second, mask=second < numbers, other=0.0)
    else:
        v *= factor
        w *= factor
    tl.store(out + first, v, mask=first < numbers)
    tl.store(out + second, w, mask=second < numbers)
