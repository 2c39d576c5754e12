"""Differentiable operations on fused kernels: RMS norm, gated SiLU, rotary, linear.

Each computes the same as the usual few operators, with sums in float32 and one rounding
at the end. They run on the processor's kernels (:mod:`hasten.parts.kernels`) or on a
GPU's (:mod:`hasten.parts.nn.fused_gpu`), by the device of the tensor. Call ``fits``
first to check that the kernels take the tensors. Only the processor has products and
attention of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.kernels import products, rowwise
from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import fused_gpu, rebind

ROUND = 64  # row counts of a piece are multiples of it
MOST_FILLED = 4 * ROUND  # remaining rows from which the package's own product is faster


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the format of a product of ``x``: autocast's inside autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def in_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Casts all tensors to autocast's format inside autocast, as torch's own products do."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, *others
    return tuple(None if t is None else t.to(autocast_dtype(x)) for t in (x, *others))


def backend(x: Tensor) -> Any:
    """Returns the module with the passes for the device of ``x``; the only such decision."""
    return rowwise if x.device.type == "cpu" else fused_gpu


def fits(kernel: str, *tensors: Tensor) -> bool:
    """Returns True if ``rms_norm``, ``swiglu`` or ``rotate`` takes these tensors together."""
    implementation = backend(tensors[0])
    supported: bool = implementation.fits(*tensors)
    return supported and not (implementation is fused_gpu and is_refused(kernel))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last side (arXiv:1910.07467)."""
    if backend(x) is fused_gpu:
        return F.rms_norm(x, weight.shape, weight, eps)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def norm_with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of ``x``, and ``x`` itself; one pass computes both gradients."""
    outputs: tuple[Tensor, Tensor] = _NormBeside.apply(x, weight, eps)
    return outputs


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns ``silu(gate) * up``."""
    output: Tensor = _SwiGLU.apply(gate, up)
    return output


def add_adapter(y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Returns ``y + scale * (x @ down.T) @ up.T`` by torch's products; may overwrite ``y``.

    This is a LoRA's part (arXiv:2106.09685): ``down`` (rank, in), ``up`` (out, rank). The scale
    is applied to the rank's few columns, and the last product adds to ``y`` itself. So a layer's
    output is read and written once, not three times.
    """
    output: Tensor = _AddAdapter.apply(y, x, down, up, scale)
    return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool) -> Tensor:
    """Rotary embedding of ``x`` (T, heads, width); see
    :func:`hasten.parts.kernels.rowwise.rotate`."""
    rotated: Tensor = _Rotate.apply(x, cos, sin, pairs_in, pairs_out)
    return rotated


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x @ weight.T + bias`` by the processor's kernels, with its three gradients."""
    flat = x.reshape(-1, x.shape[-1])
    output: Tensor = _FusedLinear.apply(flat, weight, bias)
    return output.view(*x.shape[:-1], weight.shape[0])


def joined(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Returns ``x @ weight.T`` for several weights; the gradient of ``x`` is summed in place.

    It is for query, key and value of an attention, and gate and up of an MLP. Without it,
    autograd would form one gradient of ``x`` for each, and add them up in separate passes.
    """
    flat = x.reshape(-1, x.shape[-1])
    outputs: tuple[Tensor, ...] = _Joined.apply(flat, *weights)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)


def joinable(layer: Any, bound: Callable[..., Any]) -> bool:
    """Returns True if a call of a layer is the product with its weight and nothing else.

    It must have no bias, no hooks, and no forward of its own except ``bound``, which does
    the same. A layer with an added wrapper (a number format, a probe) must be called.
    """
    return (
        rebind.plain_class(layer) is nn.Linear
        and layer.bias is None
        and not rebind.has_hooks(layer)
        and "forward" not in vars(layer)
        and rebind.bound(layer) in ((), (bound,))
    )


def matmul(x: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns ``x @ matrix`` (rows, n) by the processor's kernels, added to ``out`` if given.

    With AMX most rows go through torch's product, which is faster there. The library behind
    ``torch.mm`` compiles a kernel for each shape and keeps it. So rows of ever new lengths
    would cost time and memory without end. Therefore torch gets the row count rounded down to
    its three leading bits: between n and 2 n rows there are at most four shapes. Few remaining
    rows are filled up to the next multiple of 64, which are four shapes more. Many of them go
    through the package's own product, which takes any shape.
    """
    adds = out is not None
    out = x.new_empty(x.shape[0], matrix.shape[1]) if out is None else out
    full_rows, fills = 0, products.unit(x.dtype) == "tiles"
    if fills:
        step = max(1 << max(x.shape[0].bit_length() - 3, 0), ROUND)
        full_rows = x.shape[0] // step * step
        fills = x.shape[0] - full_rows <= MOST_FILLED
    if full_rows:
        torch.addmm(out[:full_rows], x[:full_rows], matrix, beta=int(adds), out=out[:full_rows])
    remaining, place = (x[full_rows:], out[full_rows:]) if full_rows else (x, out)
    if not fills:
        turned = matrix.stride(0) == 1 and matrix.stride(1) != 1
        factor = matrix.t() if turned else matrix
        products.product_into(place, remaining, factor, False, turned, adds)
    elif len(remaining):
        filled = x.new_zeros(-(-len(remaining) // ROUND) * ROUND, x.shape[1])
        filled[: len(remaining)] = remaining
        product = torch.mm(filled, matrix)[: len(remaining)]
        place.add_(product) if adds else place.copy_(product)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse = rowwise.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dw = rowwise.rms_norm_backward(grads[0], x, weight, inverse, None)
        return dx, dw.to(weight.dtype), None


class _NormBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, inverse = backend(x).rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, dw = backend(x).rms_norm_backward(grads[0], x, weight, inverse, grads[1])
        return dx, dw.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y: Tensor = backend(gate).swiglu(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dgate, dup = backend(grads[0]).swiglu_backward(grads[0], *ctx.saved_tensors)
        return dgate, dup


class _AddAdapter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        between = (x.reshape(-1, x.shape[-1]) @ down.t()).mul_(scale)
        if y.is_contiguous() and not y._is_view():
            y.view(-1, y.shape[-1]).addmm_(between, up.t())
            ctx.mark_dirty(y)
        else:  # autograd would copy a view's gradient
            y = torch.addmm(y.reshape(-1, y.shape[-1]), between, up.t()).view(y.shape)
        ctx.save_for_backward(x, between, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, between, down, up = ctx.saved_tensors
        wants_x, wants_down, wants_up = ctx.needs_input_grad[1:4]
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        dx = ddown = dup = None
        if wants_up:
            dup = grad.t() @ between
        if wants_x or wants_down:
            narrow = (grad @ up).mul_(ctx.scale)
            if wants_x:
                dx = (narrow @ down).view(x.shape)
            if wants_down:
                ddown = narrow.t() @ x.reshape(-1, x.shape[-1])
        return grads[0], dx, ddown, dup, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs_in: bool, pairs_out: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs_in, pairs_out
        y: Tensor = backend(x).rotate(x, cos, sin, pairs_in, pairs_out, False)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        pairs_in, pairs_out = ctx.pairs
        turn = backend(grads[0]).rotate
        return turn(grads[0], *ctx.saved_tensors, pairs_out, pairs_in, True), *[None] * 4


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        y = matmul(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = matmul(grad, weight) if wants_x else None
        dw = products.product(grad, x, True, False) if wants_weight else None
        db = grad.sum(0, dtype=torch.float32).to(grad.dtype) if wants_bias else None
        return dx, dw, db


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        learn = any(w.requires_grad for w in weights)
        ctx.save_for_backward(x if learn else None, *weights)
        return tuple(matmul(x, weight.t()) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        dx: Tensor | None = None
        weight_gradients: list[Tensor | None] = []
        for grad, weight, wanted in zip(grads, weights, wants, strict=True):
            grad = grad.contiguous()
            dx = matmul(grad, weight, dx) if wants_x else None
            weight_gradients.append(products.product(grad, x, True, False) if wanted else None)
        return dx, *weight_gradients


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[int, ...],
    scale: float,
    key_starts: tuple[int, ...] | None = None,
) -> Tensor:
    """Computes causal attention in each document of a row of tokens, (T, heads, dv).

    The shapes are ``query`` (T, heads, dk), ``key`` (K, groups, dk), ``value`` (K, groups, dv).
    Document ``i`` has the queries from ``starts[i]`` to ``starts[i + 1]``. ``key_starts`` are the
    same for its keys (None: equal). Its queries are those of its last keys.
    """
    places = starts, starts if key_starts is None else key_starts
    output: Tensor = _Attend.apply(query, key, value, *places, scale)
    return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *layout: Any) -> Tensor:
        out, lse = products.attention(query, key, value, *layout)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout = layout  # starts, starts of the keys, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = products.attention_backward(grads[0], *ctx.saved_tensors, *ctx.layout)
        return *gradients, None, None, None


# ``relu(x @ weight.T + bias)`` that keeps one tensor for the backward pass instead of two.
#
# The usual two operators keep the input or output of the ReLU and the input of the product. Here
# the ReLU is computed in place. Its output shows where it is positive, and so where the gradient
# passes. In an MLP this output is the next layer's input, which is kept anyway.


def fused_linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a linear layer and ReLU: ``x`` (..., in), ``weight`` (out, in), ``bias`` (out,).

    First derivatives only. Under autocast the product is in autocast's format, as ``F.linear`` is.

    Raises:
        ValueError: shapes that don't multiply.
    """
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"an input of {tuple(x.shape)} and a weight of {tuple(weight.shape)} have no side in "
            "common; the weight is (out, in)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"a bias of {tuple(bias.shape)} isn't one number for each output of a weight of "
            f"{tuple(weight.shape)}"
        )
    output: Tensor = _LinearReLU.apply(*in_autocast(x, weight, bias))
    return output


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, y = ctx.saved_tensors
        grad = (grads[0] * (y > 0)).reshape(-1, y.shape[-1])  # (tokens, out)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = (grad @ weight).view(x.shape) if wants_x else None
        dw = grad.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None
        return dx, dw, grad.sum(0) if wants_bias else None
