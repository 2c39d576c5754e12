"""``relu(x @ weight.T + bias)`` with one tensor kept for the backward pass in the place of two.

The usual two operators keep the input of the ReLU or its output beside the input of the product;
here the ReLU is taken in place and its output alone says where the gradient goes through: where it
is positive. In an MLP that output is the next layer's input, which is kept anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer and its ReLU: ``x`` (..., in), ``weight`` (out, in), ``bias`` (out,).

    First derivatives only. Under autocast the product is in autocast's format, as ``F.linear`` is.

    Raises:
        ValueError: shapes that don't multiply.
    """
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"an input of {tuple(x.shape)} and a weight of {tuple(weight.shape)} have no side in "
            "common; the weight is (out, in)"
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    found: Tensor = _LinearReLU.apply(x, weight, bias)
    return found


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
