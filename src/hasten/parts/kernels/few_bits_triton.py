"""Float8 rounding and few-bit widening in Triton for :mod:`hasten.parts.nn.quantised`.

Imported only if Triton is installed. Each kernel does in one pass what torch's
operators do in several, and gives the same bits. Quotients are those of IEEE 754, and a
result is rounded once. :mod:`hasten.parts.nn.quantised_gpu` calls them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel as its own: constexpr, or none.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def size_bits(numbers):
    """Absolute values as integers, in the same order; an infinity is above all numbers, NaN on top.

    A largest float would pass over NaN.
    """
    return numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(bits, limit, least):
    """The scale under which the largest number becomes ``limit``; NaN stays NaN."""
    scale = tl.math.div_rn(bits.to(tl.float32, bitcast=True), limit)
    return tl.where(scale < least, least, scale)


@triton.jit
def float8_rows_kernel(
    x, data, scale, n, by_row, limit, least, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """One row under one scale; ``WHOLE``: a block holds all of it, so that it is read once.

    The conversion takes numbers above ``limit`` to ``limit``, and a quotient is above it by its own
    rounding at most.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * by_row, data + row * n
    at = tl.arange(0, BLOCK)
    if WHOLE:
        numbers = tl.load(source + at, mask=at < n, other=0.0).to(tl.float32)
        row_scale = scale_of(tl.max(size_bits(numbers), 0), limit, least)
        rounded = tl.math.div_rn(numbers, row_scale).to(data.dtype.element_ty)
        tl.store(target + at, rounded, mask=at < n)
    else:
        largest = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, n, BLOCK):
            columns = start + at
            numbers = tl.load(source + columns, mask=columns < n, other=0.0)
            largest = tl.maximum(largest, size_bits(numbers))
        row_scale = scale_of(tl.max(largest, 0), limit, least)
        for start in range(0, n, BLOCK):
            columns = start + at
            numbers = tl.load(source + columns, mask=columns < n, other=0.0).to(tl.float32)
            rounded = tl.math.div_rn(numbers, row_scale).to(data.dtype.element_ty)
            tl.store(target + columns, rounded, mask=columns < n)
    tl.store(scale + row, row_scale)


@triton.jit
def largest_kernel(
    x,
    of_rows,
    of_columns,
    rows,
    n,
    by_row,
    ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile's share of the largest absolute value of each column and, with ``ROWS``, of each row.

    As ``size_bits`` has them, in zeros; the order in which tiles come doesn't matter.
    """
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)  # neighbours read on in the same rows
    row = tl.program_id(1).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    offset = row[:, None] * by_row + column[None, :]
    bits = size_bits(tl.load(x + offset, mask=inside, other=0.0))
    tl.atomic_max(of_columns + column, tl.max(bits, 0), mask=column < n, sem="relaxed")
    if ROWS:
        tl.atomic_max(of_rows + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")


@triton.jit
def float8_tile_kernel(
    x,
    of_rows,
    of_columns,
    data,
    scale,
    turned,
    turned_scale,
    rows,
    n,
    by_row,
    filled,
    limit,
    least,
    ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile under the scales of its columns, transposed; with ``ROWS`` under its rows', too.

    ``turned`` (n, filled) has zeros beyond ``rows``.
    """
    column = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    offset = row[:, None] * by_row + column[None, :]
    numbers = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    down = scale_of(tl.load(of_columns + column, mask=column < n, other=0), limit, least)
    by_columns = tl.math.div_rn(numbers, down[None, :])
    by_columns = tl.where(row[:, None] < rows, by_columns, 0.0)  # and not 0 / NaN
    offset = column[:, None] * filled + row[None, :]
    inside = (column < n)[:, None] & (row < filled)[None, :]
    tl.store(turned + offset, tl.trans(by_columns.to(turned.dtype.element_ty)), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(turned_scale + column, down, mask=column < n)
    if ROWS:
        across = scale_of(tl.load(of_rows + row, mask=row < rows, other=0), limit, least)
        by_rows = tl.math.div_rn(numbers, across[:, None]).to(data.dtype.element_ty)
        offset = row[:, None] * n + column[None, :]
        inside = (row < rows)[:, None] & (column < n)[None, :]
        tl.store(data + offset, by_rows, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(scale + row, across, mask=row < rows)


@triton.jit
def nf4_kernel(
    codes, scale, levels, out, blocks, numbers, BYTES: tl.constexpr, TOGETHER: tl.constexpr
):
    """Some blocks of ``BYTES`` bytes under one scale each, with two levels in a byte."""
    block = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = (block < blocks)[:, None]
    byte = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    both = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    block_scale = tl.load(scale + block[:, None], mask=inside, other=0.0)
    high = tl.load(levels + (both >> 4)) * block_scale
    low = tl.load(levels + (both & 15)) * block_scale
    at = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    weights = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + at, weights, mask=inside & (at < numbers))


@triton.jit
def int8_kernel(codes, scale, out, n, BLOCK: tl.constexpr):
    """A block of a row's codes times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(codes + row * n + at, mask=at < n, other=0).to(tl.float32)
    weights = numbers * tl.load(scale + row)
    tl.store(out + row * n + at, weights.to(out.dtype.element_ty), mask=at < n)
