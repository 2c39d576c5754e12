"""A frozen linear layer whose weight is kept in 8 or 4 bits and widened each time it is used.

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
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def from_nf4(codes: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """The float32 matrix of this shape that codes and scale stand for."""
    levels = torch.tensor(NF4_LEVELS, device=codes.device)
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

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer computes with, (out, in)."""
        if self.kind == "int8":
            return from_int8(self.codes, self.scale).to(dtype)
        shape = (self.out_features, self.in_features)
        return from_nf4(self.codes, self.scale, shape).to(dtype)

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


def quantise_linears(module: nn.Module, names: Sequence[str], kind: Kind) -> None:
    """Put a quantised layer in the place of each named one, in this module alone."""
    for name in names:
        parent, _, own = name.rpartition(".")
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
        setattr(module.get_submodule(parent), own, QuantisedLinear(layer, kind))
