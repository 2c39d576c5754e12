"""A layer's routed experts on an NVIDIA GPU: torch's grouped products, and kernels in Triton.

    (1) pairs of token and choice are sorted by expert           (positions, ends)

    (2) each token's row is copied to the rows of its pairs      (S, n)

    (3) gate and up of all experts in one grouped product        (S, 2 m)

    (4) the gated activation, then down in one grouped product   (S, n)

    (5) a token's rows are added, times its weights              (T, n)

Backward runs in the reverse order. The gradient of a routing weight is the product of a
pair's output with the token's gradient. It is taken before ``down`` instead: the
activation times ``gradient @ down``, which backward has anyway. So no pair's output is
stored for backward, which is as much memory as (2), and no pass reads it again.

The host never waits for the device. The passes are torch operators under
``hasten_gpu::``, so compiled graphs and simulated devices have them. The kernels are
:mod:`hasten.parts.kernels.experts_triton`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.parts.kernels.operators import launch, operator, why_no_triton
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import fused_gpu

ROUTED: Final = "routed_experts"  # names of the kernels in the registry
PRODUCT: Final = "grouped_mm"  # name of torch's product in the registry
ALIGNMENT: Final = 16  # bytes that addresses and rows of the grouped product are multiples of
BLOCK: Final = 2048  # most numbers of a row in one program
FEW: Final = 256  # expert numbers that fit in one byte are sorted in one pass


def why_not(device: str) -> str:
    """Returns why the fused experts can't run on a device, in one sentence; empty if they can."""
    homes = "processors and NVIDIA GPUs"
    reason = why_no_triton(torch.device(device), "the fused experts are", homes)
    if not reason and not hasattr(F, "grouped_mm"):
        return "the fused experts take torch.nn.functional.grouped_mm, which this torch lacks"
    return reason


def fits(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Returns True if the kernels and the product take these tensors, all bf16 on one GPU."""
    runs = x.device.type == "cuda" and not is_refused(ROUTED) and not is_refused(PRODUCT)
    return runs and takes(x, gate_up, down)


def takes(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Returns True if format, shapes and addresses fit the grouped product."""
    alike = all(t.dtype == torch.bfloat16 and t.device == x.device for t in (x, gate_up, down))
    sides = [down.shape[1], down.shape[2]]
    if not torch.compiler.is_compiling():  # a compiler can't read addresses
        sides += [gate_up.storage_offset(), down.storage_offset()]
    aligned = all(side * x.element_size() % ALIGNMENT == 0 for side in sides)
    dense = x.dim() == 2 and x.numel() > 0 and gate_up.is_contiguous() and down.is_contiguous()
    return alike and aligned and dense


def run(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Runs each token of ``x`` (T, n) through its experts ``index`` (T, each), times ``weights``.

    ``gate_up`` (experts, 2 m, n), ``down`` (experts, n, m); see `fits` before.
    """
    output: Tensor = _RoutedExperts.apply(x, index, weights, gate_up, down)
    return output


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        positions, ends = _sorted(index, len(down))
        inner = _product(spread(x, positions), gate_up.mT, ends)
        outputs = _product(gate(inner), down.mT, ends)
        tokens = x if ctx.needs_input_grad[3] else None  # only needed for gate's and up's gradient
        ctx.save_for_backward(tokens, weights, gate_up, down, positions, ends, inner)
        return combine(outputs, positions, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: recomputation computes a tensor when it is read, and then frees it.
        x, weights, gate_up, down, positions, ends, inner = ctx.saved_tensors
        needs_x, _, _, needs_gate_up, needs_down = ctx.needs_input_grad
        grad = spread(grads[0], positions)
        between = _product(grad, down, ends)
        dinner, dweights, weighted = gate_backward(between, inner, positions, weights, needs_down)
        ddown = _product(grad.mT, weighted, ends) if needs_down else None
        del grad, between, weighted
        dgate_up = dx = None
        if needs_gate_up:
            dgate_up = _product(dinner.mT, spread(x, positions), ends)
        if needs_x:
            dx = combine(_product(dinner, gate_up, ends), positions, None)
        return dx, None, dweights, dgate_up, ddown


def _sorted(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns the sorted row of each pair, (T, each) int64; each expert's last row + 1, int32.

    A short number sorts in fewer passes, and a search in sorted numbers counts without atomics.
    """
    number = torch.uint8 if experts <= FEW else torch.int16
    ordered, order = torch.sort(index.flatten().to(number), stable=True)
    numbers = torch.arange(experts, dtype=number, device=index.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    counting = torch.arange(order.shape[0], device=index.device)
    return torch.empty_like(order).scatter_(0, order, counting).view(index.shape), ends


def _product(one: Tensor, other: Tensor, ends: Tensor) -> Tensor:
    """Multiplies rows with their expert's matrix; or two matrices, with a product per expert."""
    grouped = getattr(F, "grouped_mm")  # noqa: B009  # torch's stubs don't have it
    product: Tensor = grouped(one, other, offs=ends)
    return product


# Passes over rows

_launch = partial(launch, "hasten.parts.kernels.experts_triton")


def _shape(n: int) -> dict[str, int]:
    """Returns the numbers of a program, and its warps."""
    block = min(fused_gpu.power(n), BLOCK)
    return {"BLOCK": block, "num_warps": fused_gpu.warps(block, 8)}


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


@operator(
    "hasten_gpu::expert_spread", lambda x, positions: x.new_empty(positions.numel(), x.shape[1])
)
def spread(x: Tensor, positions: Tensor) -> Tensor:
    """Copies row ``t`` of ``x`` (T, n) to row ``positions[t, j]`` of the result (S, n)."""
    x, positions = x.contiguous(), positions.contiguous()
    pairs, n = positions.numel(), x.shape[1]
    y = x.new_empty(pairs, n)
    if y.numel():
        programs = pairs, _blocks(n)
        _launch("spread_kernel", programs, x, positions, y, n, positions.shape[1], **_shape(n))
    return y


@operator(
    "hasten_gpu::expert_combine",
    lambda x, positions, weights: x.new_empty(positions.shape[0], x.shape[1]),
)
def combine(x: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """Sums ``weights[t, j] * x[positions[t, j]]`` over ``j`` into row ``t`` (T, n).

    ``positions`` (T, each) int64, ``weights`` (T, each) or None for ones.
    """
    x, positions = x.contiguous(), positions.contiguous()
    factors = x if weights is None else weights.contiguous()
    (tokens, each), n = positions.shape, x.shape[1]
    y = x.new_empty(tokens, n)
    if y.numel():
        shape = {"WEIGHTED": weights is not None, "EACH": each, **_shape(n)}
        _launch("combine_kernel", (tokens, _blocks(n)), x, positions, factors, y, n, **shape)
    return y


@operator("hasten_gpu::expert_gate", lambda x: x.new_empty(x.shape[0], x.shape[1] // 2))
def gate(x: Tensor) -> Tensor:
    """Returns ``silu(gate) * up`` (S, m), from gate and up in a row of ``x`` (S, 2 m)."""
    x = x.contiguous()
    rows, m = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, m)
    if y.numel():
        _launch("gate_kernel", (rows, _blocks(m)), x, y, m, **_shape(m))
    return y


@operator(
    "hasten_gpu::expert_gate_backward",
    lambda grad, x, positions, weights, inner: (
        x.new_empty(x.shape),
        weights.new_empty(weights.shape),
        grad.new_empty(grad.shape if inner else (0,)),
    ),
)
def gate_backward(
    grad: Tensor, x: Tensor, positions: Tensor, weights: Tensor, inner: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of ``x`` (S, 2 m) and of ``weights`` (T, each).

    ``grad`` (S, m) is the gradient of the activation for weights of 1. With ``inner``, the third
    result is the activation times its weight; else it is empty.
    """
    grad, x, positions, weights = (t.contiguous() for t in (grad, x, positions, weights))
    dx, dweights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    weighted = grad.new_empty(grad.shape if inner else (0,))
    m = grad.shape[1]
    if grad.numel():
        tensors = (grad, x, positions, weights, dx, dweights, weighted if inner else dx)
        programs = (positions.numel(),)
        _launch("gate_back_kernel", programs, *tensors, m, INNER=inner, **_shape(m))
    return dx, dweights, weighted
