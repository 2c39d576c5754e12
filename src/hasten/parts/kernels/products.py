"""Matrix products and attention on the processor, in bf16 and float32, as torch operators.

Both work for any shape and store nothing per shape. A library that compiles a kernel
for each shape grows with every new length. The processor decides how bf16 is
multiplied (`unit`):

- tiles: AMX (``tile_product.cpp`` and ``tile_attention.cpp``)
- pairs: AVX512-BF16, two products per instruction and lane, where that is faster than float32
- floats: any other processor. bf16 becomes float32 when it is copied for the product,
  so it is as fast as float32

``product.cpp`` and ``document_attention.cpp`` contain the kernels of the last two, and
of float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64
from typing import Any

import torch
from torch import Tensor

from hasten.machine.environment import isa_variable
from hasten.machine.host import doubles_bf16, processor_flags
from hasten.machine.lazy_torch import constant_in_graphs
from hasten.parts.kernels.build import LoadedLibrary, build_library
from hasten.parts.kernels.operators import address, no_results, operator

WORTH_THREADS = 10_000_000  # FLOPs below which one thread ends before a second wakes up
TILES = ("amx_tile", "amx_bf16", "avx512bw", "avx512_bf16")
DTYPES = (torch.float32, torch.bfloat16)
forced_unit = ""  # set by tests: another way to multiply bf16 than the processor's


def library() -> LoadedLibrary:
    """Returns the compiled kernels for any processor, or the reason why there are none."""
    return build_library("product", "document_attention")


def tile_library() -> LoadedLibrary:
    """Returns the compiled kernels for AMX, or the reason why there are none."""
    if why := _why_no_tiles():
        return LoadedLibrary(None, why)
    loaded = build_library("tile_product", "tile_attention")
    if loaded.library is not None and not loaded.library.amx_ready():
        return LoadedLibrary(None, "the system does not let this process use AMX")
    return loaded


@functools.cache
def _why_no_tiles() -> str:
    missing = [name for name in TILES if name not in processor_flags()]
    limit = isa_variable()
    why = f", or ONEDNN_MAX_CPU_ISA={limit} does not allow it" if limit else ""
    return f"this processor has no {missing[0]}{why}" if missing else ""


@constant_in_graphs  # a graph stores the answer, not its computation
def is_available() -> bool:
    """Returns True if the kernels for any processor are compiled and loaded."""
    return library().library is not None


@constant_in_graphs
def unit(dtype: torch.dtype) -> str:
    """Returns how a format's numbers are multiplied here: by ``tiles``, ``pairs`` or ``floats``."""
    if dtype == torch.float32:
        return "floats"
    if forced_unit:
        return forced_unit
    if tile_library().library is not None:
        return "tiles"
    return "pairs" if doubles_bf16() else "floats"


def fits(*tensors: Tensor) -> bool:
    """Returns True if the products of these tensors are computed here: bf16, on the processor.

    Products in float32 stay with torch, because its library is as fast.
    """
    return tensors[0].dtype == torch.bfloat16 and fits_attention(*tensors)


def fits_attention(*tensors: Tensor) -> bool:
    """Returns True if attention takes the tensors: all float32 or all bf16, on the processor."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return False
    supported = all(t.dtype == dtype and t.device.type == "cpu" for t in tensors)
    return supported and is_available()


def _threads(flops: int) -> c_int:
    return c_int(torch.get_num_threads() if flops >= WORTH_THREADS else 1)


@operator("hasten::product", lambda a, *others: a.new_empty(_product_shape(a, *others)))
def product(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
    """Returns ``a @ b`` (m, n), either of them given transposed; the result has their format."""
    out = a.new_empty(_product_shape(a, b, a_turned, b_turned))
    _multiply(out, a, b, a_turned, b_turned, add=False)
    return out


@operator("hasten::product_into", no_results, mutates=("out",))
def product_into(
    out: Tensor, a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, add: bool = False
) -> None:
    """Writes the product to ``out``, float32 or bf16, or adds it.

    Raises:
        ValueError: shapes that don't multiply, or a format that the kernel doesn't take.
    """
    _multiply(out, a, b, a_turned, b_turned, add)


def _multiply(out: Tensor, a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, add: bool) -> None:
    if _product_shape(a, b, a_turned, b_turned) != tuple(out.shape):
        raise ValueError(f"{tuple(a.shape)} times {tuple(b.shape)} is not {tuple(out.shape)}")
    if not fits_attention(a, b) or out.dtype not in DTYPES:
        raise ValueError(f"products are of bf16 or float32 on the processor, not {a.dtype}")
    if out.stride(1) != 1 and out.shape[1] > 1:
        raise ValueError("the output of a product must have its rows in one piece")
    a, b = _rows(a), _rows(b)
    m, n = out.shape
    k = a.shape[0] if a_turned else a.shape[1]
    if not m * n * k:  # an empty sum
        if not add:
            out.zero_()
        return
    kind = a_turned | b_turned << 1 | (out.dtype == torch.float32) << 2 | add << 3
    run_products(out, a, b, [(0, 0, 0, m, n, k)], kind)


def run_products(
    out: Tensor, a: Tensor, b: Tensor, groups: Sequence[tuple[int, ...]], kind: int
) -> None:
    """Computes several products at once; ``product.cpp`` describes ``groups`` and ``kind``.

    Nothing is checked: tensors have rows in one piece, and groups lie within them.
    """
    arguments = [x for t in (a, b, out) for x in (address(t), c_int64(t.stride(-2)))]
    threads = _threads(sum(2 * m * n * k for *_, m, n, k in groups))
    table = _int64([number for group in groups for number in group])
    way, count = unit(a.dtype), c_int64(len(groups))
    if way == "tiles":
        tile_library().function("amx_gemm")(*arguments, table, count, c_int(kind), threads)
        return
    kind |= (a.dtype == torch.float32) << 4
    pairs = c_int(way == "pairs")
    library().function("unit_gemm")(*arguments, table, count, c_int(kind), pairs, threads)


def _product_shape(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> tuple[int, int]:
    (k, m) = a.shape if a_turned else a.shape[::-1]
    (n, j) = b.shape if b_turned else b.shape[::-1]
    if j != k:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)} have no side in common")
    return m, n


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@operator(
    "hasten::document_attention",
    lambda query, key, value, *_: (
        query.new_empty(*query.shape[:2], value.shape[-1]),
        query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32),
    ),
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of documents end to end in ``query`` (T, heads, dk).

    ``key`` (K, groups, dk), ``value`` (K, groups, dv), ``starts`` (documents + 1) where each begins
    and the last ends, and ``key_starts`` for its keys. Queries are those of a document's last keys.
    Returns (T, heads, dv), and (heads, T) float32 for the backward pass.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    tokens, heads, _ = query.shape
    _check_starts(starts, tokens)
    _check_starts(key_starts, len(key))
    lengths, keys = _lengths(starts), _lengths(key_starts)
    if any(n < own or (n and not own) for own, n in zip(lengths, keys, strict=True)):
        raise ValueError("a document has fewer keys than queries, or keys alone")
    out = query.new_empty(tokens, heads, value.shape[-1])
    lse = query.new_empty(heads, tokens, dtype=torch.float32)
    strides, shape = _layout(query, key, value, len(starts) - 1)
    tensors = [address(t) for t in (query, key, value)]
    places = _int64([*starts, *key_starts])
    arguments = (strides, shape, c_float(scale), places, address(out), address(lse))
    _attention("forward", query, value, (starts, key_starts), *tensors, *arguments)
    return out, lse


def _lengths(starts: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(starts)]


def _check_starts(starts: Sequence[int], tokens: int) -> None:
    if list(starts) != sorted(starts) or not starts or (starts[0], starts[-1]) != (0, tokens):
        raise ValueError(f"documents that start at {list(starts)} don't cover {tokens} tokens")


@operator(
    "hasten::document_attention_backward",
    lambda grad, query, key, value, *_: tuple(t.new_empty(t.shape) for t in (query, key, value)),
)
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Sequence[int],
    key_starts: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous gradients of ``query``, ``key`` and ``value``."""
    grad, query, key, value = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (grad, query, key, value)
    )
    gradients = tuple(t.new_empty(t.shape) for t in (query, key, value))
    strides, shape = _layout(query, key, value, len(starts) - 1, grad)
    tensors = [address(t) for t in (query, key, value, out, grad)]
    arguments = (
        strides,
        shape,
        c_float(scale),
        _int64([*starts, *key_starts]),
        *(address(t) for t in (lse, *gradients)),
    )
    _attention("backward", query, value, (starts, key_starts), *tensors, *arguments)
    return gradients[0], gradients[1], gradients[2]


def _attention(
    direction: str,
    query: Tensor,
    value: Tensor,
    starts: tuple[Sequence[int], Sequence[int]],
    *arguments: Any,
) -> None:
    lengths, keys = map(_lengths, starts)
    pairs = sum(length * (2 * n - length) for length, n in zip(lengths, keys, strict=True))
    flops = pairs * int(query.shape[1]) * int(query.shape[2] + value.shape[2])
    threads, way = _threads(flops), unit(query.dtype)
    if way == "tiles" and lengths != keys:  # tiles take as many keys as queries
        way = "pairs" if doubles_bf16() else "floats"
    if way == "tiles":
        tile_library().function(f"amx_attention_{direction}")(*arguments, threads)
        return
    kind = (c_int(query.dtype == torch.bfloat16), c_int(way == "pairs"))
    library().function(f"unit_attention_{direction}")(*arguments, *kind, threads)


def _layout(
    query: Tensor, key: Tensor, value: Tensor, documents: int, *more: Tensor
) -> tuple[Any, Any]:
    strides = [s for t in (query, key, value, *more) for s in t.stride()[:2]]
    tokens, heads, dk = query.shape
    groups, dv = key.shape[1], value.shape[2]
    if key.shape[1:] != (groups, dk) or value.shape[:2] != key.shape[:2] or heads % groups:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "don't belong together"
        )
    return _int64(strides), _int64((tokens, heads, groups, dk, dv, documents))


def _int64(numbers: Sequence[int]) -> Any:
    return (c_int64 * len(numbers))(*numbers)
