"""bf16 matrix products and attention on AMX, as torch operators on the processor.

Both work for any shape and store nothing per shape. A library that compiles a kernel
for each shape grows with every new length. ``gemm.cpp`` and ``attention.cpp`` contain
the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from hasten.parts.kernels.build import LoadedLibrary, build_library, processor_flags

WORTH_THREADS = 10_000_000  # FLOPs below which one thread is done before a second is awake
NEEDED = ("amx_tile", "amx_bf16", "avx512bw", "avx512_bf16")


def library() -> LoadedLibrary:
    """The compiled kernels, or why there are none."""
    missing = [name for name in NEEDED if name not in processor_flags()]
    if missing:
        return LoadedLibrary(None, f"this processor has no {missing[0]}")
    loaded = build_library("gemm", "attention")
    if loaded.library is not None and not loaded.library.amx_ready():
        return LoadedLibrary(None, "the system does not let this process use AMX")
    return loaded


def fits(*tensors: Tensor) -> bool:
    """Returns True if these kernels take the tensors: bfloat16, on a processor with AMX."""
    return all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors) and (
        library().library is not None
    )


def _call(name: str, flops: int, *arguments: Any) -> None:
    threads = torch.get_num_threads() if flops >= WORTH_THREADS else 1
    library().function(name)(*arguments, c_int(threads))


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


@custom_op("hasten::product", mutates_args=())
def product(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
    """``a @ b`` (m, n) of bf16 matrices, either of them given transposed."""
    out = a.new_empty(_product_shape(a, b, a_turned, b_turned))
    product_into(out, a, b, a_turned, b_turned)
    return out


@product.register_fake
def _(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> Tensor:
    return a.new_empty(_product_shape(a, b, a_turned, b_turned))


def product_into(
    out: Tensor, a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, add: bool = False
) -> None:
    """The product written to ``out``, float32 or bf16, or added to what is there.

    Raises:
        ValueError: shapes that don't multiply, or a format that the kernel doesn't take.
    """
    if _product_shape(a, b, a_turned, b_turned) != tuple(out.shape):
        raise ValueError(f"{tuple(a.shape)} times {tuple(b.shape)} is not {tuple(out.shape)}")
    if not fits(a, b) or out.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"products are of bf16 matrices on the processor, not {a.dtype}")
    if out.stride(1) != 1 and out.shape[1] > 1:
        raise ValueError("the output of a product must have its rows in one piece")
    a, b = _rows(a), _rows(b)
    m, n = out.shape
    k = a.shape[0] if a_turned else a.shape[1]
    if not m * n * k:  # a sum of nothing
        if not add:
            out.zero_()
        return
    kind = a_turned | b_turned << 1 | (out.dtype == torch.float32) << 2 | add << 3
    run_products(out, a, b, [(0, 0, 0, m, n, k)], kind)


def run_products(
    out: Tensor, a: Tensor, b: Tensor, groups: Sequence[tuple[int, ...]], kind: int
) -> None:
    """Several products at once; see ``gemm.cpp`` for ``groups`` and ``kind``. Nothing is checked:

    tensors are bf16 (``out`` also float32) with rows in one piece, and groups lie within them.
    """
    arguments = [x for t in (a, b, out) for x in (_at(t), c_int64(t.stride(-2)))]
    flops = sum(2 * m * n * k for *_, m, n, k in groups)
    table = _int64([number for group in groups for number in group])
    _call("amx_gemm", flops, *arguments, table, c_int64(len(groups)), c_int(kind))


def _product_shape(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool) -> tuple[int, int]:
    (k, m) = a.shape if a_turned else a.shape[::-1]
    (n, j) = b.shape if b_turned else b.shape[::-1]
    if j != k:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)} have no side in common")
    return m, n


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@custom_op("hasten::document_attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of documents that lie end to end in ``query`` (T, heads, dk).

    ``key`` (T, groups, dk), ``value`` (T, groups, dv), ``starts`` (documents + 1) where each begins
    and the last ends. Returns (T, heads, dv), and (heads, T) float32 for the backward pass.
    """
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    tokens, heads, _ = query.shape
    if list(starts) != sorted(starts) or not starts or (starts[0], starts[-1]) != (0, tokens):
        raise ValueError(f"documents that start at {list(starts)} don't cover {tokens} tokens")
    out = query.new_empty(tokens, heads, value.shape[-1])
    lse = query.new_empty(heads, tokens, dtype=torch.float32)
    strides, shape = _layout(query, key, value, len(starts) - 1)
    flops, tensors = _flops(query, value, starts), [_at(t) for t in (query, key, value)]
    arguments = (strides, shape, c_float(scale), _int64(starts), _at(out), _at(lse))
    _call("amx_attention_forward", flops, *tensors, *arguments)
    return out, lse


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    return out, query.new_empty(heads, tokens, dtype=torch.float32)


@custom_op("hasten::document_attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``query``, ``key`` and ``value``, contiguous."""
    grad, query, key, value = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (grad, query, key, value)
    )
    gradients = tuple(t.new_empty(t.shape) for t in (query, key, value))
    strides, shape = _layout(query, key, value, len(starts) - 1, grad)
    flops, tensors = _flops(query, value, starts), [_at(t) for t in (query, key, value, out, grad)]
    arguments = (
        strides,
        shape,
        c_float(scale),
        _int64(starts),
        *(_at(t) for t in (lse, *gradients)),
    )
    _call("amx_attention_backward", flops, *tensors, *arguments)
    return gradients[0], gradients[1], gradients[2]


@attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _layout(
    query: Tensor, key: Tensor, value: Tensor, documents: int, *more: Tensor
) -> tuple[Any, Any]:
    strides = [s for t in (query, key, value, *more) for s in t.stride()[:2]]
    tokens, heads, dk = query.shape
    groups, dv = key.shape[1], value.shape[2]
    if key.shape != (tokens, groups, dk) or value.shape[:2] != (tokens, groups) or heads % groups:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "don't belong together"
        )
    return _int64(strides), _int64((tokens, heads, groups, dk, dv, documents))


def _flops(query: Tensor, value: Tensor, starts: Sequence[int]) -> int:
    pairs = sum((b - a) ** 2 for a, b in itertools.pairwise(starts))
    return pairs * int(query.shape[1]) * int(query.shape[2] + value.shape[2])


def _int64(numbers: Sequence[int]) -> Any:
    return (c_int64 * len(numbers))(*numbers)
