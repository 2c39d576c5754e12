"""Float8 rounding and few-bit widening in Triton for :mod:`hasten.parts.nn.quantised`.

Imported only if Triton is installed. Each kernel does in one pass what torch's
operators do in several, and gives the same bits. Quotients are those of IEEE 754, and a
result is rounded once. :mod:`hasten.parts.nn.quantised_gpu` calls them.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads a kernel's annotations as its own: constexpr, or none.

from __future__ import annotations

import triton
import triton.language as tl

SMALL = tl.constexpr(2.0**-60)  # smaller scales, and their numbers, are multiplied by LIFT
LIFT = tl.constexpr(2.0**64)
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def size_bits(numbers):
    """Returns absolute values as integers of their width, in the same order, NaN above infinity.

    NaN is above infinity; a largest float would pass over it. The width is kept so that registers
    hold two numbers of 16 bits until the scale is known.
    """
    if numbers.dtype == tl.float32:
        bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        bits = numbers.to(tl.int16, bitcast=True) & 0x7FFF
    return bits


@triton.jit
def float_bits(bits, kind: tl.constexpr):
    """Returns the float32 bits of the same absolute values; ``bits`` are ``size_bits``."""
    if kind != tl.float32:
        sizes = bits.to(tl.int16).to(kind, bitcast=True)
        bits = sizes.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def scale_of(bits, limit, least):
    """Returns the scale at which the largest number becomes ``limit``; NaN stays NaN."""
    scale = tl.math.div_rn(bits.to(tl.float32, bitcast=True), limit)
    return tl.where(scale < least, least, scale)


@triton.jit
def divisor_of(scale):
    """Prepares the divisions by a scale: returns (a power of two, scale * it, 1 / that product).

    The power makes the remainders of small numbers exact: without it they lose bits below 2^-149.
    """
    lift = tl.where(scale < SMALL, LIFT, 1.0)
    lifted = scale * lift
    inverse = tl.math.div_rn(1.0, lifted)
    # The remainder of zero, divided by an infinite scale, would be NaN.
    return lift, tl.where(lifted == INFINITE, 0.0, lifted), inverse


@triton.jit
def quotient(numbers, lift, lifted, inverse):
    """Returns ``numbers / scale`` as IEEE 754 rounds it, in 4 instructions instead of about 20.

    A product with the rounded inverse is off by two units in the last place at most. The remainder
    is exact in a fused multiply-add and corrects it (Markstein, IBM J. Res. Dev. 34-1, 1990). The
    signs are such that a zero keeps its own. Quotients below 2^-18, which all formats round to
    zero, may be off.
    """
    numbers = numbers * lift
    near = numbers * inverse
    excess = tl.fma(near, lifted, -numbers)
    return tl.fma(excess, -inverse, near)


@triton.jit
def float8_rows_kernel(
    x, data, scale, n, by_row, limit, least, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """Rounds one row with one scale; ``WHOLE``: a block holds the full row, so it is read once.

    The conversion takes numbers above ``limit`` to ``limit``, and a quotient is above it by its own
    rounding at most. Otherwise the second read is served by a cache.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * by_row, data + row * n
    at = tl.arange(0, BLOCK)
    if WHOLE:
        numbers = tl.load(source + at, mask=at < n, other=0.0)
        bits = float_bits(tl.max(size_bits(numbers), 0), x.dtype.element_ty)
        row_scale = scale_of(bits, limit, least)
        lift, lifted, inverse = divisor_of(row_scale)
        rounded = quotient(numbers.to(tl.float32), lift, lifted, inverse).to(data.dtype.element_ty)
        tl.store(target + at, rounded, mask=at < n)
    else:
        largest = size_bits(tl.zeros([BLOCK], dtype=x.dtype.element_ty))
        for start in range(0, n, BLOCK):
            columns = start + at
            numbers = tl.load(source + columns, mask=columns < n, other=0.0)
            largest = tl.maximum(largest, size_bits(numbers))
        bits = float_bits(tl.max(largest, 0), x.dtype.element_ty)
        row_scale = scale_of(bits, limit, least)
        lift, lifted, inverse = divisor_of(row_scale)
        for start in range(0, n, BLOCK):
            columns = start + at
            numbers = tl.load(source + columns, mask=columns < n, other=0.0).to(tl.float32)
            rounded = quotient(numbers, lift, lifted, inverse).to(data.dtype.element_ty)
            tl.store(target + columns, rounded, mask=columns < n)
    tl.store(scale + row, row_scale)


@triton.jit(do_not_specialize=["rows"])
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
    """Finds a tile's largest absolute values by column and, with ``ROWS``, by row.

    As ``float_bits`` has them, in zeros; the order in which tiles come doesn't matter. Programs are
    (tiles of a group, one below the other; columns of tiles; groups).
    """
    tile_row = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    row = tile_row * HIGH + tl.arange(0, HIGH)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    offset = row[:, None] * by_row + column[None, :]
    bits = size_bits(tl.load(x + offset, mask=inside, other=0.0))
    down_bits = float_bits(tl.max(bits, 0), x.dtype.element_ty)
    tl.atomic_max(of_columns + column, down_bits, mask=column < n, sem="relaxed")
    if ROWS:
        across_bits = float_bits(tl.max(bits, 1), x.dtype.element_ty)
        tl.atomic_max(of_rows + row, across_bits, mask=row < rows, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])  # filled is a multiple of 16, which makes stores wide
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
    FILLED: tl.constexpr,
):
    """Rounds and transposes a tile with its columns' scales; with ``ROWS`` also with its rows'.

    ``turned`` (n, filled) has zeros beyond ``rows``; ``FILLED``: there are such columns.
    """
    # Backwards, because the last tiles of the earlier read are still in the cache.
    group = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    tile_row = group * tl.num_programs(0) + tl.program_id(0)
    tile_column = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    column = tile_column * WIDE + tl.arange(0, WIDE)
    row = tile_row * HIGH + tl.arange(0, HIGH)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    offset = row[:, None] * by_row + column[None, :]
    numbers = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if ROWS:
        row_scale = scale_of(tl.load(of_rows + row, mask=row < rows, other=0), limit, least)
        lift, lifted, inverse = divisor_of(row_scale)
        by_rows = quotient(numbers, lift[:, None], lifted[:, None], inverse[:, None])
        offset = row[:, None] * n + column[None, :]
        tl.store(data + offset, by_rows.to(data.dtype.element_ty), mask=inside)
        if tile_column == 0:
            tl.store(scale + row, row_scale, mask=row < rows)
        tl.debug_barrier()  # otherwise the compiler mixes both halves, which takes more registers
    column_scale = scale_of(tl.load(of_columns + column, mask=column < n, other=0), limit, least)
    lift, lifted, inverse = divisor_of(column_scale)
    by_columns = quotient(numbers, lift[None, :], lifted[None, :], inverse[None, :])
    if FILLED:
        by_columns = tl.where(row[:, None] < rows, by_columns, 0.0)  # and not 0 / NaN
    offset = column[:, None] * filled + row[None, :]
    inside = (column < n)[:, None] & (row < filled)[None, :]
    tl.store(turned + offset, tl.trans(by_columns.to(turned.dtype.element_ty)), mask=inside)
    if tile_row == 0:
        tl.store(turned_scale + column, column_scale, mask=column < n)


@triton.jit
def nf4_kernel(
    codes, scale, levels, out, blocks, numbers, BYTES: tl.constexpr, TOGETHER: tl.constexpr
):
    """Decodes blocks of ``BYTES`` bytes with one scale each, two levels per byte."""
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
    """Decodes a block of a row's codes times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(codes + row * n + at, mask=at < n, other=0).to(tl.float32)
    weights = numbers * tl.load(scale + row)
    tl.store(out + row * n + at, weights.to(out.dtype.element_ty), mask=at < n)
