"""AdamW for many tensors in one launch, in Triton: ``adamw.py`` bit by bit.

Imported only if Triton is installed. A program updates ``CHUNK`` numbers of one tensor,
a tile at a time. The rows of a tile are 256 numbers, which share a scale if moments
have 8 bits. A table on the device has the address of each tensor. Products are never
fused with sums, and quotients and roots are rounded as on a processor. So moments have
the same bits on all devices.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as its own: constexpr, or none.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hasten.parts.kernels import low_bit
from hasten.parts.kernels.codec_triton import mixed

CHUNK = 65_536  # numbers of a program
ROWS = 4  # rows of a tile
FLOAT32, BF16, INT8 = 0, 1, 2  # formats of moments

WIDTH = tl.constexpr(low_bit.BLOCK)
TINY = tl.constexpr(low_bit.TINY)
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}  # formats of weights and gradients


@triton.jit
def to_bf16(values, dice):
    """Rounds float32 numbers to one of their two bf16 neighbours, by dice from 0 to 65535."""
    bits = (values.to(tl.int32, bitcast=True) + dice) & -65536
    # A sum could turn the bits of a NaN into those of a zero.
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values).to(tl.bfloat16)


@triton.jit
def nearest_bf16(values):
    """Rounds float32 to the nearest bf16, ties to even; the interpreter's own cast truncates."""
    odd = (values.to(tl.int32, bitcast=True) >> 16) & 1
    return to_bf16(values, odd + 0x7FFF)


@triton.jit
def start_of(shares, starts):
    """Returns the start of the search in a table, by the upper half of each number."""
    upper = (shares.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.load(starts + upper).to(tl.int32)


@triton.jit
def signed_places(shares, borders, starts):
    """Returns the nearest indices in the table of first moments."""
    start = start_of(shares, starts)
    return start + (tl.load(borders + start) < shares).to(tl.int32)


@triton.jit
def squared_places(shares, table, starts, dice):
    """Returns random indices in the table of second moments, right in the mean; 0 only for 0."""
    start = tl.maximum(start_of(shares, starts), 1)
    middle = tl.load(table + start)
    more = middle < shares
    other = tl.load(table + tl.where(more, start + 1, start - 1))
    low, high = tl.where(more, middle, other), tl.where(more, other, middle)
    chance = tl.math.div_rn(shares - low, high - low) * 65536.0
    index = tl.where(more, start, start - 1) + (dice.to(tl.float32) < chance).to(tl.int32)
    return tl.maximum(index, (shares > 0).to(tl.int32))


@triton.jit
def shares_of(values):
    """Returns values as shares of the largest of their row, and these largest values."""
    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # in this order NaN is the largest
    scale = tl.max(sizes, 1, keep_dims=True).to(tl.float32, bitcast=True)
    divisor = tl.where(scale < TINY, TINY, scale)
    inverse = tl.math.div_rn(1.0, divisor)
    # A correction rounds the product like the quotient (Markstein, IBM J. R&D 34, 1990); division
    # by infinity gives 0 without it.
    rough = values * inverse
    remainder = tl.fma(-tl.where(divisor < float("inf"), divisor, 0.0), rough, values)
    return tl.fma(remainder, inverse, rough), scale


@triton.jit
def column(table, number, tensors, tensor):
    """Returns a tensor's entry in a column of the table."""
    return tl.load(table + number * tensors + tensor)


@triton.jit
def at_address(table, number, tensors, tensor, KIND: tl.constexpr, STEP: tl.constexpr):
    """Returns the memory at the address in a column of the table."""
    pointer = column(table, number, tensors, tensor).to(tl.pointer_type(KIND))
    if STEP > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# Experts without tokens have no gradients, so the number of tensors varies between steps.
@triton.jit(do_not_specialize=["tensors", "depth"])
def adamw_kernel(  # noqa: C901, PLR0915  # Triton compiles it as one function
    table,
    rules,
    divisor,
    signed,
    borders,
    signed_starts,
    squared,
    squared_starts,
    tensors,
    depth,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTS: tl.constexpr,
    COPY: tl.constexpr,
    DIVIDED: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Updates a chunk of one tensor.

    Args:
        table: columns of int64, one entry per tensor: its first program, its numbers and
            the key of its random bits. Then the addresses of weight, gradient, moments,
            their scales, and the copy in bf16.
        rules: numbers of the update, for each tensor.
        divisor: divides all gradients.
        signed, borders, signed_starts, squared, squared_starts: tables of 8-bit moments
            (``low_bit.Tables``).
        depth: steps of the binary search for a tensor.
        STEP: all addresses and sizes are multiples of this count of numbers.
    """
    program = tl.program_id(0).to(tl.int64)
    tensor, beyond = tensors * 0, tensors
    for _ in range(depth):
        middle = (tensor + beyond) // 2
        later = tl.load(table + middle) <= program
        tensor = tl.where(later, middle, tensor)
        beyond = tl.where(later, beyond, middle)
    begin = (program - tl.load(table + tensor)) * CHUNK
    count = column(table, 1, tensors, tensor)
    key = column(table, 2, tensors, tensor)
    weight = at_address(table, 3, tensors, tensor, WEIGHT, STEP)
    grad = at_address(table, 4, tensors, tensor, GRAD, STEP)
    moment_dtype = tl.float32 if MOMENTS == 0 else tl.bfloat16 if MOMENTS == 1 else tl.uint8
    first = at_address(table, 5, tensors, tensor, moment_dtype, STEP)
    second = at_address(table, 6, tensors, tensor, moment_dtype, STEP)
    first_scale = at_address(table, 7, tensors, tensor, tl.float32, 1)
    second_scale = at_address(table, 8, tensors, tensor, tl.float32, 1)
    copy = at_address(table, 9, tensors, tensor, tl.bfloat16, STEP)
    rules += tensor * 7
    rate, keep = tl.load(rules), tl.load(rules + 1)
    new, beta2, new2 = tl.load(rules + 2), tl.load(rules + 3), tl.load(rules + 4)
    root, eps = tl.load(rules + 5), tl.load(rules + 6)
    factor = 1.0
    if DIVIDED:
        factor = tl.math.div_rn(1.0, tl.load(divisor))
    row = tl.arange(0, ROWS)[:, None]
    offset = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    tiles = (tl.minimum(count - begin, CHUNK) + ROWS * WIDTH - 1) // (ROWS * WIDTH)
    for tile in range(tiles.to(tl.int32)):
        base = begin + tile * (ROWS * WIDTH)
        remaining = tl.minimum(count - base, ROWS * WIDTH).to(tl.int32)
        at = base + offset
        inside = offset // STEP * STEP < remaining
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if DIVIDED:
            g *= factor
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        block = base // WIDTH + row
        used = row * WIDTH < remaining  # true for a complete block
        if MOMENTS == 2:
            in_block = offset // WIDTH * WIDTH < remaining
            m = tl.load(signed + tl.load(first + at, mask=in_block, other=0).to(tl.int32))
            m *= tl.load(first_scale + block, mask=used, other=0.0)
            v = tl.load(squared + tl.load(second + at, mask=in_block, other=0).to(tl.int32))
            v *= tl.load(second_scale + block, mask=used, other=0.0)
        else:
            m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        m += (g - m) * new
        v = v * beta2 + g * g * new2
        w = w * keep - tl.math.div_rn(m, tl.math.sqrt_rn(v) * root + eps) * rate
        at_random: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
        if MOMENTS > 0 or at_random:
            dice = mixed(offset.to(tl.uint32) + (base + key).to(tl.uint32))
            dice = mixed(dice ^ ((key >> 32) ^ (base >> 32)).to(tl.uint32))
        if at_random:
            weight_dice = (mixed(dice + 0x9E3779B9) & 0xFFFF).to(tl.int32)
            tl.store(weight + at, to_bf16(w, weight_dice), mask=inside)
        else:
            tl.store(weight + at, w, mask=inside)
            if COPY:
                tl.store(copy + at, nearest_bf16(w), mask=inside)
        if MOMENTS == 2:
            shares, scale = shares_of(m)
            tl.store(
                first + at,
                signed_places(shares, borders, signed_starts).to(tl.uint8),
                mask=in_block,
            )
            tl.store(first_scale + block, scale, mask=used)
            shares, scale = shares_of(v)
            dice = (dice >> 16).to(tl.int32)
            places = squared_places(shares, squared, squared_starts, dice)
            tl.store(second + at, places.to(tl.uint8), mask=in_block)
            tl.store(second_scale + block, scale, mask=used)
        elif MOMENTS == 1:
            tl.store(first + at, to_bf16(m, (dice & 0xFFFF).to(tl.int32)), mask=inside)
            tl.store(second + at, to_bf16(v, (dice >> 16).to(tl.int32)), mask=inside)
        else:
            tl.store(first + at, m, mask=inside)
            tl.store(second + at, v, mask=inside)
