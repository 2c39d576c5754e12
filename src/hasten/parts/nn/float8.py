"""Linear layers whose three products take float8 inputs, each block of numbers under its own scale.

A float8 number (e4m3: 3 bits of mantissa, at most 448) has half a bf16's bytes and, on GPUs that
have it, twice its speed. Its range is so short that numbers are divided by a scale, the largest of
a block / 448, before they are rounded. The blocks run along the axis that a product sums over:

    y  (T, out) = x (T, in)     @ W (out, in)^T   x, W by rows
    dx (T, in)  = dy (T, out)   @ W^T (in, out)^T dy by rows, W by columns
    dW (out,in) = dy^T (out, T) @ x^T (in, T)^T   dy, x by columns: tokens are summed over

``rowwise`` has one scale for a whole row (as torchao's recipe of that name). ``blockwise`` has one
for 1 x 128 numbers of activations and gradients and one for 128 x 128 of a weight (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2), so that an outlier harms its neighbours alone. Masters, sums and
results keep their wider formats. On a processor, and for checking, ``emulate`` rounds the inputs
in the same way and multiplies in float32: the error of float8 without its speed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Recipe = Literal["rowwise", "blockwise"]
RECIPES: Final = ("rowwise", "blockwise")
BLOCK: Final = 128
SIDE: Final = 16  # the hardware's product takes sides that are multiples of this
E4M3: Final = torch.float8_e4m3fn
# Small errors here change whole predictions or routes, and DeepSeek-V3 keeps them wide too.
KEPT_WIDE: Final = frozenset(
    ("lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate")
)


class Quantised(NamedTuple):
    """A matrix in float8: ``data`` times the scale of the block it lies in."""

    data: Tensor  # (rows, columns), float8
    scale: Tensor  # (blocks of rows, blocks of columns), float32
    block: tuple[int, int]  # rows and columns under one scale


def quantise(x: Tensor, block: tuple[int, int], dtype: torch.dtype = E4M3) -> Quantised:
    """Round a matrix to float8; a block with an infinite or NaN number becomes NaN, not wrong."""
    largest = torch.finfo(dtype).max
    blocks = _in_blocks(x.float(), block)
    scale = blocks.abs().amax(dim=(1, 3)) / largest
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a block of zeros keeps its zeros
    rounded = (blocks / scale[:, None, :, None]).clamp(-largest, largest).to(dtype)
    rows, columns = x.shape
    data = rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    return Quantised(data, scale, block)


def dequantise(q: Quantised) -> Tensor:
    """The float32 matrix that a quantised one stands for."""
    blocks = _in_blocks(q.data.float(), q.block) * q.scale[:, None, :, None]
    rows, columns = q.data.shape
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def product(
    a_MK: Tensor, b_NK: Tensor, recipe: Recipe, *, weight: bool, emulate: bool, dtype: torch.dtype
) -> Tensor:
    """``a @ b.T`` of float8 inputs, (M, N) in ``dtype``; ``weight``: b is one, not activations."""
    a = quantise(a_MK, _block(recipe, a_MK.shape[1], weight=False))
    b = quantise(b_NK, _block(recipe, b_NK.shape[1], weight=weight))
    if emulate:
        return (dequantise(a) @ dequantise(b).t()).to(dtype)
    short = -a_MK.shape[1] % SIDE  # tokens come in any number; filler adds zero to the sum
    a_data, b_data = _padded(a.data, short), _padded(b.data, short)
    found: Tensor = torch._scaled_mm(
        a_data, b_data.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16
    )
    return found.to(dtype)


class _Linear(torch.autograd.Function):
    """The three products; a frozen weight, or an input without gradient, costs none of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, emulate: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.emulate = recipe, emulate
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            y = product(rows, weight, recipe, weight=True, emulate=emulate, dtype=dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = gradients[0].reshape(-1, weight.shape[0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(
                dy, weight.t(), ctx.recipe, weight=True, emulate=ctx.emulate, dtype=x.dtype
            ).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, x.shape[-1])
            dw = product(
                dy.t(), rows.t(), ctx.recipe, weight=False, emulate=ctx.emulate, dtype=weight.dtype
            )
        return dx, dw, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, emulate: bool) -> Tensor:
    """``F.linear`` with float8 products, in the format that autocast, or else ``x``, has."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    y: Tensor = _Linear.apply(x, weight, recipe, emulate, dtype)
    return y if bias is None else y + bias.to(dtype)


class Float8Layers:
    """Gives a module's linear layers float8 products, and takes them back."""

    def __init__(self, recipe: Recipe = "rowwise", emulate: bool = False) -> None:
        if recipe not in RECIPES:
            raise ValueError(f"recipe {recipe!r} is unknown: say rowwise or blockwise")
        if recipe == "blockwise" and not emulate:
            raise ValueError("blockwise float8 exists emulated only: say emulate, or rowwise")
        self.recipe, self.emulate = recipe, emulate
        self.names: list[str] = []  # of the layers that compute in float8
        self.left: list[str] = []  # of those whose sides don't suit the hardware
        self.ran: set[str] = set()  # of them, those that were seen to
        self._bound: list[tuple[nn.Linear, Any]] = []  # each with what was bound to it before

    def attach(self, module: nn.Module) -> None:
        """Bind the products to the instances; parameters and their names stay as they are.

        Raises:
            ValueError: no layer suits.
        """
        for name, layer in module.named_modules():
            last = name.removesuffix(".base_layer").rpartition(".")[2]  # an adapter is around it
            if not isinstance(layer, nn.Linear) or last in KEPT_WIDE or "lora_" in name:
                continue
            if any(side % SIDE for side in layer.weight.shape):
                self.left.append(name)
                continue
            self.names.append(name)
            self._bound.append((layer, vars(layer).get("forward")))
            layer.forward = partial(self._forward, name, layer)
        if not self.names:
            raise ValueError(
                f"no linear layer is left whose sides are multiples of {SIDE}; layers of a base in "
                "few bits, heads and routers don't count"
            )

    def detach(self) -> None:
        for layer, before in self._bound:
            del layer.forward
            if before is not None:
                layer.forward = before
        self._bound.clear()

    def _forward(self, name: str, layer: nn.Linear, x: Tensor) -> Tensor:
        self.ran.add(name)
        return linear(x, layer.weight, layer.bias, self.recipe, self.emulate)


def _block(recipe: Recipe, length: int, weight: bool) -> tuple[int, int]:
    if recipe == "rowwise":
        return (1, max(length, 1))
    return (BLOCK if weight else 1, BLOCK)


def _in_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """(rows, columns) filled up with zeros, as (row blocks, block rows, column blocks, columns)."""
    rows, columns = block
    padded = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _padded(data: Tensor, columns: int) -> Tensor:
    if not columns:
        return data
    # Float8 has no pad of its own; a zero is the zero byte.
    return F.pad(data.view(torch.uint8), (0, columns)).view(data.dtype)
