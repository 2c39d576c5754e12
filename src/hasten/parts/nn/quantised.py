"""Linear layers in few bits: a frozen weight in 8 or 4, or products whose inputs are float8.

Where only adapters learn, the base weight is read in forward and backward and never changed, so it
can rest in few bits (QLoRA, arXiv:2305.14314). Each product widens it for its own moment; nothing
wide is kept, and no weight gradient is ever made.

``int8``: 255 even steps for each row, 8 bits and 32 for the row. ``nf4``: 16 levels at quantiles of
a normal distribution, which trained weights resemble, a scale for each 64: 4.5 bits (section 3 of
the paper; its second quantisation, of the scales, saves 0.37 bits more and is left out).

    layer = QuantisedLinear(nn.Linear(64, 32), "nf4")
    y = layer(x)                       # dx flows through; layer.widened() is the weight in use
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.kernels.refused import is_refused

Kind = Literal["int8", "nf4"]
KINDS: Final = ("int8", "nf4")
NF4_BLOCK: Final = 64
# Appendix E of the paper, as its library has them in float32.
NF4_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a matrix: int8 of its shape, float32 (rows, 1)."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1, keepdim=True) / 127
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros keeps its zeros
    return (wide / scale).round().clamp(-127, 127).to(torch.int8), scale


def from_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrix that codes and scale stand for."""
    return codes.float() * scale


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): two levels to a byte, float32 (blocks, 1); the last block is filled up."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.tensor(NF4_LEVELS, device=flat.device)
    between = (levels[1:] + levels[:-1]) / 2  # the nearest level lies between two of these
    found = torch.bucketize(blocks / scale, between).to(torch.uint8).view(-1, 2)
    return found[:, 0] << 4 | found[:, 1], scale


def from_nf4(
    codes: Tensor, scale: Tensor, shape: tuple[int, int], levels: Tensor | None = None
) -> Tensor:
    """The float32 matrix of this shape that codes and scale stand for.

    ``levels`` are ``NF4_LEVELS`` on the device; without them they are sent there, for which a host
    waits.
    """
    levels = torch.tensor(NF4_LEVELS, device=codes.device) if levels is None else levels
    both = torch.stack([codes >> 4, codes & 15], dim=1).int().view(-1, NF4_BLOCK)
    rows, columns = shape
    return (levels[both] * scale).flatten()[: rows * columns].view(rows, columns)


def rounded(weight: Tensor, kind: Kind) -> Tensor:
    """What a weight becomes by being quantised and widened, in its own format."""
    if kind == "int8":
        return from_int8(*to_int8(weight)).to(weight.dtype)
    rows, columns = weight.shape
    return from_nf4(*to_nf4(weight), (rows, columns)).to(weight.dtype)


class QuantisedLinear(nn.Module):
    """Stands where a linear layer stood; its bias stays as it was, frozen."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    levels: Tensor | None

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"the format {kind!r} is unknown: say int8 or nf4")
        if not bool(torch.isfinite(linear.weight).all()):
            raise ValueError("a weight that isn't finite can't be quantised")
        self.kind = kind
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = to_int8(linear.weight) if kind == "int8" else to_nf4(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        bias = None if linear.bias is None else linear.bias.detach()
        self.register_buffer("bias", bias)  # moves with the module, and never learns
        levels = torch.tensor(NF4_LEVELS, device=codes.device) if kind == "nf4" else None
        self.register_buffer("levels", levels, persistent=False)  # on the device once and for all

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer computes with, (out, in)."""
        if self.kind == "int8":
            return from_int8(self.codes, self.scale).to(dtype)
        shape = (self.out_features, self.in_features)
        return from_nf4(self.codes, self.scale, shape, self.levels).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y: Tensor = _Product.apply(x.to(dtype), self)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


class _Product(torch.autograd.Function):
    """``x @ W.T``; backward widens W once more, rather than keep it wide meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.widened(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        return dy @ ctx.layer.widened(dy.dtype), None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that multiplies as one; DeepSeek-V4's grouped one doesn't."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def quantise_linears(module: nn.Module, names: Sequence[str], kind: Kind) -> None:
    """Put a quantised layer in the place of each named one, in this module alone."""
    for name in names:
        parent, _, own = name.rpartition(".")
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
        setattr(module.get_submodule(parent), own, QuantisedLinear(layer, kind))


# Linear layers whose three products take float8 inputs, each block of numbers under its own scale.
#
# A float8 number (e4m3: 3 bits of mantissa, at most 448) has half a bf16's bytes and, on GPUs that
# have it, twice its speed. Its range is so short that numbers are divided by a scale, the largest
# of a block / 448, before they are rounded. The blocks run along the axis that a product sums over:
#
#     y  (T, out) = x (T, in)     @ W (out, in)^T   x, W by rows
#     dx (T, in)  = dy (T, out)   @ W^T (in, out)^T dy by rows, W by columns
#     dW (out,in) = dy^T (out, T) @ x^T (in, T)^T   dy, x by columns: tokens are summed over
#
# ``rowwise`` has one scale for a whole row (as torchao's recipe of that name). ``blockwise`` has
# one for 1 x 128 numbers of activations and gradients and one for 128 x 128 of a weight
# (DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so that an outlier harms its neighbours alone.
# Masters, sums and results keep their wider formats. On a processor, and for checking, ``emulate``
# rounds the inputs in the same way and multiplies in float32: the error of float8 without its
# speed.

SCALED_MM: Final = "scaled_mm"  # the product's name where it is checked
Recipe = Literal["rowwise", "blockwise"]
RECIPES: Final = ("rowwise", "blockwise")
BLOCK: Final = 128
SIDE: Final = 16  # the hardware's product takes sides that are multiples of this
E4M3: Final = torch.float8_e4m3fn
# Small errors here change whole predictions or routes, and DeepSeek-V3 keeps them wide too.
KEPT_WIDE: Final = frozenset(
    ("lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate")
)


class Float8Blocks(NamedTuple):
    """A matrix in float8: ``data`` times the scale of the block it lies in."""

    data: Tensor  # (rows, columns), float8
    scale: Tensor  # (blocks of rows, blocks of columns), float32
    block: tuple[int, int]  # rows and columns under one scale


def quantise(x: Tensor, block: tuple[int, int], dtype: torch.dtype = E4M3) -> Float8Blocks:
    """Round a matrix to float8; a block with an infinite or NaN number becomes NaN, not wrong."""
    largest = torch.finfo(dtype).max
    blocks = _in_blocks(x.float(), block)
    scale = blocks.abs().amax(dim=(1, 3)) / largest
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a block of zeros keeps its zeros
    rounded = (blocks / scale[:, None, :, None]).clamp(-largest, largest).to(dtype)
    rows, columns = x.shape
    data = rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    return Float8Blocks(data, scale, block)


def dequantise(q: Float8Blocks) -> Tensor:
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


class _QuantisedLinear(torch.autograd.Function):
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
    y: Tensor = _QuantisedLinear.apply(x, weight, recipe, emulate, dtype)
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
            if not isinstance(layer, nn.Linear) or not is_plain_linear(layer):
                continue
            if last in KEPT_WIDE or "lora_" in name:
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
        if is_refused(SCALED_MM) and not self.emulate:
            return F.linear(x, layer.weight, layer.bias)
        self.ran.add(name)
        return linear(x, layer.weight, layer.bias, self.recipe, self.emulate)


def _block(recipe: Recipe, length: int, weight: bool) -> tuple[int, int]:
    if recipe == "rowwise":
        return (1, max(length, 1))
    return (BLOCK if weight else 1, BLOCK)


def _in_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """(rows, columns) filled up with zeros, as (row blocks, block rows, column blocks, columns)."""
    rows, columns = block
    right, below = -x.shape[1] % columns, -x.shape[0] % rows
    padded = F.pad(x, (0, right, 0, below)) if right or below else x  # a pad by nothing copies too
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _padded(data: Tensor, columns: int) -> Tensor:
    if not columns:
        return data
    # Float8 has no pad of its own; a zero is the zero byte.
    return F.pad(data.view(torch.uint8), (0, columns)).view(data.dtype)
