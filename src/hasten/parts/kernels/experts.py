"""Expert layers on the processor, as torch operators: products by group, and sums.

Rows are sorted by expert; ``starts`` (experts + 1) has each expert's first row. All
products of a layer run in one call, for any number of tokens per expert. Nothing is
compiled for a shape. :mod:`hasten.parts.kernels.products` and ``experts.cpp`` contain
the kernels. In float32 the products are torch's, one expert after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from ctypes import c_int, c_int64

import torch
from torch import Tensor

from hasten.parts.kernels import rowwise
from hasten.parts.kernels.operators import address, no_results, operator
from hasten.parts.kernels.products import fits, run_products


@operator(
    "hasten::expert_products",
    lambda x, weights, starts, turned: x.new_empty(x.shape[0], weights.shape[1 if turned else 2]),
)
def products(x: Tensor, weights: Tensor, starts: Sequence[int], turned: bool) -> Tensor:
    """Returns each row of ``x`` (S, k) times its expert's matrix of ``weights``: (S, n).

    ``weights`` is (experts, k, n), or (experts, n, k) if ``turned``. Both are contiguous in
    the last dimension, so a part of the rows of every expert may be passed.
    """
    n, k = (weights.shape[1], weights.shape[2]) if turned else weights.shape[:0:-1]
    _check(x, starts, k, len(weights))
    out = x.new_empty(x.shape[0], n)
    if not fits(x, weights) or weights.stride(-1) != 1:
        for matrix, (first, last) in zip(weights, itertools.pairwise(starts), strict=True):
            torch.mm(x[first:last], matrix.t() if turned else matrix, out=out[first:last])
        return out
    step = weights.stride(0)
    groups = [
        (first * x.stride(0), expert * step, first * n, last - first, n, k)
        for expert, (first, last) in enumerate(itertools.pairwise(starts))
    ]
    run_products(out, x, weights, groups, 2 * turned)
    return out


@operator("hasten::expert_gradients_", no_results, mutates=("out",))
def gradients_(out: Tensor, grad: Tensor, x: Tensor, starts: Sequence[int]) -> None:
    """Writes ``grad_e.T @ x_e`` (n, k) for every expert; zeros for an expert without rows."""
    _check(x, starts, out.shape[2], len(out))
    _check(grad, starts, out.shape[1], len(out))
    if not fits(grad, x) or out.stride(-1) != 1:
        for expert_out, (first, last) in zip(out, itertools.pairwise(starts), strict=True):
            torch.mm(grad[first:last].t(), x[first:last], out=expert_out)
        return
    _, n, k = out.shape
    groups = [
        (first * grad.stride(0), first * x.stride(0), expert * out.stride(0), n, k, last - first)
        for expert, (first, last) in enumerate(itertools.pairwise(starts))
    ]
    run_products(out, grad, x, groups, 1)


@operator(
    "hasten::combine",
    lambda x, places, weights: x.new_empty(places.shape[0], x.shape[1]),
)
def combine(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sums ``weights[t, j] * x[places[t, j]]`` over ``j`` into row ``t`` (T, n).

    ``places`` (T, each) int64, ``weights`` (T, each) float32 or None for ones.
    """
    x, places = x.contiguous(), places.contiguous()
    weights = None if weights is None else weights.contiguous()
    out = x.new_empty(places.shape[0], x.shape[1])
    sizes = (c_int64(places.shape[0]), c_int64(places.shape[1]), c_int64(x.shape[1]))
    tensors = (address(t) for t in (x, places, weights, out))
    half = c_int(x.dtype == torch.bfloat16)
    rowwise.call("rows_combine", places.numel() * x.shape[1], *tensors, *sizes, half)
    return out


@operator(
    "hasten::combine_backward",
    lambda grad, x, sources, weights: (x.new_empty(x.shape), weights.new_empty(weights.shape)),
)
def combine_backward(
    grad: Tensor, x: Tensor, sources: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns gradients of ``x`` (S, n) and of the weight of each of its rows (S,), float32.

    ``sources`` (S,) is the row of the sum that each row of ``x`` went to, ``weights`` (S,) float32.
    """
    grad, x, sources, weights = (t.contiguous() for t in (grad, x, sources, weights))
    dx, dw = torch.empty_like(x), torch.empty_like(weights)
    tensors = (address(t) for t in (grad, x, sources, weights, dx, dw))
    sizes = (c_int64(x.shape[0]), c_int64(x.shape[1]), c_int(x.dtype == torch.bfloat16))
    rowwise.call("rows_combine_backward", x.numel(), *tensors, *sizes)
    return dx, dw


def _check(x: Tensor, starts: Sequence[int], width: int, experts: int) -> None:
    """Checks that every row belongs to one expert; others would return uninitialised memory."""
    ordered = list(starts) == sorted(starts) and len(starts) == experts + 1
    covers_all = ordered and (starts[0], starts[-1]) == (0, x.shape[0])
    if x.stride(1) != 1 or x.shape[1] != width or not covers_all:
        raise ValueError(
            f"rows {tuple(x.shape)} and starts {list(starts)} don't belong to {experts} experts of "
            f"{width} columns"
        )
