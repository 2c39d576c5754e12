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
import importlib
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import custom_op

from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import fused_gpu

FLOAT8: Final = "float8_rounding"  # the kernels' names where they are checked
WIDENING: Final = "widening"
SIDE: Final = 16  # the hardware's product takes sides that are multiples of this
NF4_BLOCK: Final = 64  # numbers under one scale
WIDEST: Final = 16_384  # numbers of a row that one program holds; of a wider one it reads blocks
LOOP_BLOCK: Final = 4096
TILE: Final = 64  # rows and columns of a program that looks at both
MOST_ROWS: Final = 65_535 * TILE  # as many tiles as a launch takes there
WARPS: Final = 8  # but of a program that has a row
WIDEN_BLOCK: Final = 2048  # numbers of a program that widens
LEAST: Final = torch.finfo(torch.float32).tiny  # of a scale


def may_round(x: Tensor) -> bool:
    """Returns True if the float8 operators take a matrix."""
    fits = x.dtype in fused_gpu.DTYPES and x.numel() > 0 and x.shape[0] <= MOST_ROWS
    return _runs(FLOAT8, x) and fits


def may_widen(codes: Tensor, dtype: torch.dtype) -> bool:
    """Returns True if the widening operators take these codes."""
    return _runs(WIDENING, codes) and dtype in fused_gpu.DTYPES and codes.numel() > 0


def _runs(kernel: str, x: Tensor) -> bool:
    return x.device.type == "cuda" and not is_refused(kernel) and has_kernels(str(x.device))


def has_kernels(device: str) -> bool:
    """Returns True if Triton's kernels run on a device."""
    # A compiler that looks through here takes no cache, and asks once for its graph.
    ask = _asked.__wrapped__ if torch.compiler.is_compiling() else _asked
    return ask(device)


@functools.cache
def _asked(device: str) -> bool:
    return not fused_gpu.why_not(device)


def _launch(name: str, *args: Any, **fixed: Any) -> None:
    kernels = importlib.import_module("hasten.parts.kernels.few_bits_triton")
    fused_gpu.launch(getattr(kernels, name), *args, **fixed)


def row_warps(block: int) -> int:
    """Returns the warps of a program that rounds a row; all warps for the widest row."""
    return fused_gpu.warps(block, 16, 32)


@custom_op("hasten_gpu::float8_rows", mutates_args=())
def float8_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` (T, n) in float8 and its scales (T, 1): a row's largest / the format's largest."""
    x = _rows_contiguous(x)
    rows, n = x.shape
    data, scale = x.new_empty((rows, n), dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)
    block = fused_gpu.power(n) if n <= WIDEST else LOOP_BLOCK
    shape = {"BLOCK": block, "WHOLE": n <= WIDEST, "num_warps": row_warps(block)}
    limits = torch.finfo(dtype).max, LEAST
    _launch("float8_rows_kernel", (rows,), x, data, scale, n, x.stride(0), *limits, **shape)
    return data, scale


@float8_rows.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty(x.shape[0], x.shape[1], x, dtype)


@custom_op("hasten_gpu::float8_columns", mutates_args=())
def float8_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x.T`` in float8, (n, T filled up with zeros), and its scales (n, 1)."""
    turned = _empty(x.shape[1], _filled(x), x, dtype)
    _by_tiles(x, turned, turned, dtype, rows=False)
    return turned


@float8_columns.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty(x.shape[1], _filled(x), x, dtype)


@custom_op("hasten_gpu::float8_both", mutates_args=())
def float8_both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the results of ``float8_rows`` and ``float8_columns``."""
    straight, turned = (
        _empty(x.shape[0], x.shape[1], x, dtype),
        _empty(x.shape[1], _filled(x), x, dtype),
    )
    _by_tiles(x, straight, turned, dtype, rows=True)
    return (*straight, *turned)


@float8_both.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_empty(x.shape[0], x.shape[1], x, dtype), *_empty(x.shape[1], _filled(x), x, dtype))


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
    """The largest numbers first, in a pass of their own; then each tile is rounded and turned."""
    x = _rows_contiguous(x)
    count, n = x.shape
    filled = turned[0].shape[1]
    largest = torch.zeros(count + n, dtype=torch.int32, device=x.device)
    of_rows, of_columns = largest[:count], largest[count:]
    programs = -(-n // TILE), -(-filled // TILE)
    shape = {"ROWS": rows, "HIGH": TILE, "WIDE": TILE, "num_warps": WARPS}
    inputs, sizes = (programs, x, of_rows, of_columns), (count, n, x.stride(0))
    _launch("largest_kernel", *inputs, *sizes, **shape)
    made, limits = (*straight, *turned), (torch.finfo(dtype).max, LEAST)
    _launch("float8_tile_kernel", *inputs, *made, *sizes, filled, *limits, **shape)


@custom_op("hasten_gpu::widen_nf4", mutates_args=())
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


@widen_nf4.register_fake
def _(
    codes: Tensor, scale: Tensor, levels: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


@custom_op("hasten_gpu::widen_int8", mutates_args=())
def widen_int8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes the matrix from int8 codes and a scale for each row."""
    rows, n = codes.shape
    out = codes.new_empty((rows, n), dtype=dtype)
    programs = rows, -(-n // WIDEN_BLOCK)
    arguments = codes.contiguous(), scale.contiguous(), out, n
    _launch("int8_kernel", programs, *arguments, BLOCK=WIDEN_BLOCK, num_warps=WARPS)
    return out


@widen_int8.register_fake
def _(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _filled(x: Tensor) -> int:
    rows: int = x.shape[0]
    return -(-rows // SIDE) * SIDE


def _empty(rows: int, n: int, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty((rows, n), dtype=dtype), x.new_empty((rows, 1), dtype=torch.float32)
