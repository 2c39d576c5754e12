"""Float8 rounding and widening of few bits on a GPU: Triton kernels as torch operators.

    x (T, n)  --float8_rows----->  (T, n) and a scale for each row
              --float8_columns-->  (n, T) and a scale for each column, the transposed matrix
              --float8_both----->  both, with two reads of x
    codes     --widen_nf4------->  the weight in the format of the product
              --widen_int8------>

A product with scales sums along a row of both operands, and torch's wants both of them contiguous
there. So what is needed by columns is written transposed, filled up to a multiple of 16 numbers.
The kernels are :mod:`hasten.parts.kernels.few_bits_triton`. They give the bits of the operators in
:mod:`hasten.parts.nn.quantised`, which run where these can't.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from hasten.parts.kernels.operators import launch, operator
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import fused_gpu

FLOAT8: Final = "float8_rounding"  # names of the kernels in the registry
WIDENING: Final = "widening"
SIDE: Final = 16  # sides of the hardware's product are multiples of this
NF4_BLOCK: Final = 64  # numbers under one scale
WIDEST: Final = 16_384  # numbers of a row in one program; wider rows are read in blocks
LOOP_BLOCK: Final = 4096
ROW_NUMBERS: Final = 32  # numbers of a row in each lane of a program
ROW_WARPS: Final = 8  # most warps
# The compiler would use all registers that a thread may have. With this limit several programs
# share a multiprocessor: one loads while another waits for the largest number of its row.
MAX_REGISTERS_PER_THREAD: Final = 128
# A program's tile (rows, columns, warps): for the largest numbers, for rounding by columns and by
# both. They were the fastest of 30 on an H200.
LARGEST_TILE: Final = 128, 128, 4
COLUMNS_TILE: Final = 64, 64, 4
BOTH_TILE: Final = 64, 64, 4
# Number of tiles, one below the other, that run together. Their rows of the transposed matrix are
# neighbours in memory and written at about the same time.
GROUP: Final = 8
MOST: Final = 65_535  # most programs of a launch in its second and third dimension
WARPS: Final = 8  # warps of a program that dequantises
WIDEN_BLOCK: Final = 2048  # numbers that one such program writes
LEAST: Final = torch.finfo(torch.float32).tiny  # smallest scale
_launch = functools.partial(launch, "hasten.parts.kernels.few_bits_triton")


def may_round(x: Tensor) -> bool:
    """Returns True if the float8 operators take a matrix."""
    if not _runs(FLOAT8, x) or x.dtype not in fused_gpu.DTYPES or not x.numel():
        return False
    tiles = LARGEST_TILE, COLUMNS_TILE, BOTH_TILE
    sides: tuple[int, ...] = tuple(x.shape)
    return all(side <= MOST * min(tile[axis] for tile in tiles) for axis, side in enumerate(sides))


def may_widen(codes: Tensor, dtype: torch.dtype) -> bool:
    """Returns True if the widening operators take these codes."""
    return _runs(WIDENING, codes) and dtype in fused_gpu.DTYPES and codes.numel() > 0


def _runs(kernel: str, x: Tensor) -> bool:
    allowed = x.device.type == "cuda" and not is_refused(kernel)
    return allowed and fused_gpu.has_kernels(str(x.device))


def row_warps(block: int) -> int:
    """Returns the warps of a program that rounds a row."""
    return fused_gpu.warps(block, ROW_NUMBERS, ROW_WARPS)


@operator("hasten_gpu::float8_rows", lambda x, dtype: _straight(x, dtype))
def float8_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``x`` (T, n) in float8 and scales (T, 1): a row's largest / the format's largest."""
    x = _rows_contiguous(x)
    rows, n = x.shape
    data, scale = _straight(x, dtype)
    block = fused_gpu.power(n) if n <= WIDEST else LOOP_BLOCK
    shape = {"BLOCK": block, "WHOLE": n <= WIDEST}
    shape |= {"num_warps": row_warps(block), "maxnreg": MAX_REGISTERS_PER_THREAD}
    limits = torch.finfo(dtype).max, LEAST
    _launch("float8_rows_kernel", (rows,), x, data, scale, n, x.stride(0), *limits, **shape)
    return data, scale


@operator("hasten_gpu::float8_columns", lambda x, dtype: _turned(x, dtype))
def float8_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``x.T`` in float8, (n, T padded with zeros), and its scales (n, 1)."""
    turned = _turned(x, dtype)
    _by_tiles(x, turned, turned, dtype, rows=False)
    return turned


@operator("hasten_gpu::float8_both", lambda x, dtype: (*_straight(x, dtype), *_turned(x, dtype)))
def float8_both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of ``float8_rows`` and ``float8_columns``."""
    straight, turned = _straight(x, dtype), _turned(x, dtype)
    _by_tiles(x, straight, turned, dtype, rows=True)
    return (*straight, *turned)


def empty_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Replaces ``float8_columns`` if they aren't needed: no numbers, scales of NaN."""
    n = x.shape[1]
    return x.new_empty((1, 1), dtype=dtype).expand(n, _filled(x)), _nan(x.device).expand(n, 1)


@functools.cache
def _nan(device: torch.device) -> Tensor:
    return torch.full((1, 1), torch.nan, device=device)


def _by_tiles(
    x: Tensor,
    straight: tuple[Tensor, Tensor],
    turned: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    rows: bool,
) -> None:
    """Finds the largest numbers in one pass; then rounds and transposes each tile."""
    x = _rows_contiguous(x)
    count, n = x.shape
    filled = turned[0].shape[1]
    largest = torch.zeros(count + n, dtype=torch.int32, device=x.device)
    of_rows, of_columns = largest[:count], largest[count:]
    inputs, sizes = (x, of_rows, of_columns), (count, n, x.stride(0))
    programs, shape = _tiles(LARGEST_TILE, count, n)
    _launch("largest_kernel", programs, *inputs, *sizes, ROWS=rows, **shape)
    made, limits = (*straight, *turned), (torch.finfo(dtype).max, LEAST)
    programs, shape = _tiles(BOTH_TILE if rows else COLUMNS_TILE, filled, n)
    shape |= {"ROWS": rows, "FILLED": filled != count}
    _launch("float8_tile_kernel", programs, *inputs, *made, *sizes, filled, *limits, **shape)


def _tiles(
    tile: tuple[int, int, int], rows: int, n: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Returns the programs for a matrix in tiles, and their constants."""
    high, wide, warps = tile
    down = -(-rows // high)
    together = min(GROUP, down)
    shape = {"HIGH": high, "WIDE": wide, "num_warps": warps}
    return (together, -(-n // wide), -(-down // together)), shape


@operator(
    "hasten_gpu::widen_nf4",
    lambda codes, scale, levels, rows, columns, dtype: codes.new_empty(
        (rows, columns), dtype=dtype
    ),
)
def widen_nf4(
    codes: Tensor, scale: Tensor, levels: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """Decodes the matrix (rows, columns) from nf4 codes, scales and levels."""
    out = codes.new_empty((rows, columns), dtype=dtype)
    blocks, together = scale.numel(), WIDEN_BLOCK // NF4_BLOCK
    arguments = codes.contiguous(), scale.contiguous(), levels, out, blocks, rows * columns
    shape = {"BYTES": NF4_BLOCK // 2, "TOGETHER": together, "num_warps": WARPS}
    _launch("nf4_kernel", (-(-blocks // together),), *arguments, **shape)
    return out


@operator(
    "hasten_gpu::widen_int8", lambda codes, scale, dtype: codes.new_empty(codes.shape, dtype=dtype)
)
def widen_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes the matrix from int8 codes and a scale for each row."""
    rows, n = codes.shape
    out = codes.new_empty((rows, n), dtype=dtype)
    programs = rows, -(-n // WIDEN_BLOCK)
    arguments = codes.contiguous(), scale.contiguous(), out, n
    _launch("int8_kernel", programs, *arguments, BLOCK=WIDEN_BLOCK, num_warps=WARPS)
    return out


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _filled(x: Tensor) -> int:
    rows: int = x.shape[0]
    return -(-rows // SIDE) * SIDE


def _straight(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns memory for a matrix in float8, and for the scale of each row."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _turned(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns memory for the transposed matrix, padded, and its scales."""
    n = x.shape[1]
    return x.new_empty((n, _filled(x)), dtype=dtype), x.new_empty((n, 1), dtype=torch.float32)
