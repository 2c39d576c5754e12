"""Linear layers in few bits: frozen weights in 8 or 4 bits, or products in float8.

If only adapters are trained, the base weight never changes. So it can be stored in few
bits (QLoRA, arXiv:2305.14314). Each product decodes it temporarily to the format of its
input. The decoded weight isn't stored, and its gradient isn't computed.

- ``int8``: 255 even levels, 8 bits per number and a float32 scale per row.
- ``nf4``: 16 levels at quantiles of a normal distribution, which trained weights
  resemble, and a float32 scale for each 64 numbers: 4.5 bits per number (section 3 of the
  paper). Quantising the scales as well, as the paper does, would save 0.37 bits.

    layer = QuantisedLinear(nn.Linear(64, 32), "nf4")
    y = layer(x)                       # dx is computed; layer.widened() is the weight in use
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.parts.kernels.registry import is_refused
from hasten.parts.nn import quantised_gpu
from hasten.parts.nn.fused_functions import autocast_dtype
from hasten.parts.nn.late_weights import read_now
from hasten.parts.nn.rebind import plain_class
from hasten.parts.nn.recompute import is_thrown_away

Kind = Literal["int8", "nf4"]
KINDS: Final = ("int8", "nf4")
NF4_BLOCK: Final = quantised_gpu.NF4_BLOCK
# Levels of nf4 in float32: appendix E of the paper, with the digits of its library.
NF4_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scale) of a matrix: int8 of its shape, float32 (rows, 1)."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1, keepdim=True) / 127
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros stays zero
    return (wide / scale).round().clamp(-127, 127).to(torch.int8), scale


def from_int8(codes: Tensor, scale: Tensor) -> Tensor:
    """Decodes the float32 matrix from codes and scale."""
    return codes.float() * scale


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (codes, scale): two codes per byte, float32 (blocks, 1); pads the last block."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.tensor(NF4_LEVELS, device=flat.device)
    between = (levels[1:] + levels[:-1]) / 2  # bounds between neighbouring levels
    codes = torch.bucketize(blocks / scale, between).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scale


def from_nf4(
    codes: Tensor, scale: Tensor, shape: tuple[int, int], levels: Tensor | None = None
) -> Tensor:
    """Decodes the float32 matrix of this shape from codes and scale.

    ``levels`` are ``NF4_LEVELS`` on the device. None: they are copied there, and the host
    waits.
    """
    levels = torch.tensor(NF4_LEVELS, device=codes.device) if levels is None else levels
    both = torch.stack([codes >> 4, codes & 15], dim=1).int().view(-1, NF4_BLOCK)
    rows, columns = shape
    return (levels[both] * scale).flatten()[: rows * columns].view(rows, columns)


def rounded(weight: Tensor, kind: Kind) -> Tensor:
    """Returns a weight after quantising and widening, in its own format."""
    if kind == "int8":
        return from_int8(*to_int8(weight)).to(weight.dtype)
    rows, columns = weight.shape
    return from_nf4(*to_nf4(weight), (rows, columns)).to(weight.dtype)


class QuantisedLinear(nn.Module):
    """Replaces a linear layer; its bias is unchanged and frozen."""

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    levels: Tensor | None

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"the format {kind!r} is unknown; supported: int8 and nf4")
        if not bool(torch.isfinite(linear.weight).all()):
            raise ValueError("a weight that isn't finite can't be quantised")
        self.kind = kind
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = to_int8(linear.weight) if kind == "int8" else to_nf4(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        bias = None if linear.bias is None else linear.bias.detach()
        self.register_buffer("bias", bias)  # moves with the module, and is never trained
        levels = torch.tensor(NF4_LEVELS, device=codes.device) if kind == "nf4" else None
        self.register_buffer("levels", levels, persistent=False)  # sent to the device once

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight that the layer computes with, (out, in)."""
        shape = (self.out_features, self.in_features)
        one_pass = quantised_gpu.may_widen(self.codes, dtype)
        if self.levels is not None:
            if one_pass:
                return quantised_gpu.widen_nf4(self.codes, self.scale, self.levels, *shape, dtype)
            return from_nf4(self.codes, self.scale, shape, self.levels).to(dtype)
        if one_pass:
            return quantised_gpu.widen_int8(self.codes, self.scale, dtype)
        return from_int8(self.codes, self.scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x)
        y: Tensor = _Product.apply(x.to(dtype), self)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


class _Product(torch.autograd.Function):
    """``x @ W.T``; backward decodes W again, so it isn't stored between the passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.widened(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        return dy @ ctx.layer.widened(dy.dtype), None


def is_plain_linear(module: nn.Module) -> bool:
    """Returns True for a plain linear layer; DeepSeek-V4's grouped one isn't."""
    return isinstance(module, nn.Linear) and plain_class(module).forward is nn.Linear.forward


def quantise_linears(module: nn.Module, names: Sequence[str], kind: Kind) -> None:
    """Replaces each named layer by a quantised one, in this module alone."""
    for name in names:
        parent, _, child = name.rpartition(".")
        layer = module.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
        read_now(layer)  # weights that are read later: one layer at a time
        setattr(module.get_submodule(parent), child, QuantisedLinear(layer, kind))


# Linear layers with float8 inputs of all three products, each block of numbers with its own scale.
#
# A float8 number (e4m3: 3 bits of mantissa, at most 448) has half of bf16's bytes and, on GPUs with
# float8 units, twice its speed. Its range is short. So numbers are divided by a scale before
# rounding: the largest magnitude in a block / 448. Blocks run along the product's summed axis:
#
#     y  (T, out) = x (T, in)     @ W (out, in)^T   x, W by rows
#     dx (T, in)  = dy (T, out)   @ W^T (in, out)^T dy by rows, W by columns
#     dW (out,in) = dy^T (out, T) @ x^T (in, T)^T   dy, x by columns: the sum is over tokens
#
# ``rowwise`` has one scale for a full row (as torchao's recipe of that name). ``blockwise`` has one
# for 1 x 128 numbers of activations and gradients and one for 128 x 128 of a weight (DeepSeek-V3,
# arXiv:2412.19437, section 3.3.2), so an outlier only affects its neighbours. Masters, sums and
# results keep their wider formats. On a processor, and in checks, ``emulate`` rounds the inputs in
# the same way and multiplies in float32: the error of float8 without its speed.

SCALED_MM: Final = "scaled_mm"  # name of the product in the registry
Recipe = Literal["rowwise", "blockwise"]
RECIPES: Final = ("rowwise", "blockwise")
BLOCK: Final = 128
SIDE: Final = quantised_gpu.SIDE
E4M3: Final = torch.float8_e4m3fn
# Names of layers that stay wide: their small errors change predictions or routes (as DeepSeek-V3).
KEPT_WIDE: Final = frozenset(
    ("lm_head", "embed_out", "score", "classifier", "gate", "router", "shared_expert_gate")
)


class Float8Blocks(NamedTuple):
    """A matrix in float8: ``data`` times the scale of its block."""

    data: Tensor  # (rows, columns), float8
    scale: Tensor  # (blocks of rows, blocks of columns), float32
    block: tuple[int, int]  # (rows, columns) with one scale


def quantise(x: Tensor, block: tuple[int, int], dtype: torch.dtype = E4M3) -> Float8Blocks:
    """Rounds a matrix to float8; a block with an infinite or NaN number becomes NaN."""
    largest = torch.finfo(dtype).max
    blocks = _in_blocks(x.float(), block)
    # Divides by a tensor, because a GPU multiplies by a number's rounded reciprocal.
    scale = blocks.abs().amax(dim=(1, 3)) / blocks.new_full((), largest)
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a block of zeros stays zero
    rounded = (blocks / scale[:, None, :, None]).clamp(-largest, largest).to(dtype)
    rows, columns = x.shape
    data = rounded.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    return Float8Blocks(data, scale, block)


def dequantise(q: Float8Blocks) -> Tensor:
    """Decodes the float32 matrix of a quantised one."""
    blocks = _in_blocks(q.data.float(), q.block) * q.scale[:, None, :, None]
    rows, columns = q.data.shape
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _by_row(data: Tensor, scale: Tensor) -> Float8Blocks:
    """Returns a float8 matrix with a scale for each row."""
    return Float8Blocks(data, scale, (1, data.shape[1]))


class Rounding(NamedTuple):
    """Rounding of a product's inputs; ``emulate``: products are in float32 instead of float8."""

    recipe: Recipe
    emulate: bool

    def by_rows(self, x: Tensor, weight: bool = False) -> Float8Blocks:
        """Returns a matrix for a product that sums along its rows; ``weight``: as a weight."""
        if self.in_one_pass(x):
            return _by_row(*quantised_gpu.float8_rows(x, E4M3))
        return quantise(x, self._block(x.shape[1], weight))

    def by_columns(self, x: Tensor, weight: bool = False) -> Float8Blocks:
        """Returns the transposed matrix, for a product that sums along the columns."""
        if self.in_one_pass(x):
            return _by_row(*quantised_gpu.float8_columns(x, E4M3))
        return quantise(x.t(), self._block(x.shape[0], weight))

    def by_both(self, x: Tensor, weight: bool = False) -> tuple[Float8Blocks, Float8Blocks]:
        """Returns ``by_rows`` and ``by_columns``, with fewer reads."""
        if self.in_one_pass(x):
            data, scale, turned, turned_scale = quantised_gpu.float8_both(x, E4M3)
            return _by_row(data, scale), _by_row(turned, turned_scale)
        return self.by_rows(x, weight), self.by_columns(x, weight)

    def product(self, a_MK: Float8Blocks, b_NK: Float8Blocks, dtype: torch.dtype) -> Tensor:
        """Returns ``a @ b.T``, (M, N) in ``dtype``."""
        if self.emulate:
            return (dequantise(a_MK) @ dequantise(b_NK).t()).to(dtype)
        a_data, b_data = a_MK.data, b_NK.data
        if filler := -a_data.shape[1] % SIDE:
            # Zeros don't change the sum. Float8 has no pad operator; its zero is the zero byte.
            a_data, b_data = (
                F.pad(data.view(torch.uint8), (0, filler)).view(data.dtype)
                for data in (a_data, b_data)
            )
        product: Tensor = torch._scaled_mm(
            a_data, b_data.t(), scale_a=a_MK.scale, scale_b=b_NK.scale.t(), out_dtype=torch.bfloat16
        )
        return product.to(dtype)

    def in_one_pass(self, x: Tensor) -> bool:
        """Returns True if hasten's GPU kernels can round this matrix in one pass."""
        return self.recipe == "rowwise" and not self.emulate and quantised_gpu.may_round(x)

    def _block(self, length: int, weight: bool) -> tuple[int, int]:
        if self.recipe == "rowwise":
            return (1, max(length, 1))
        return (BLOCK if weight else 1, BLOCK)


class Float8Weight:
    """Rounds a layer's weight for each product, or once while ``kept`` is True.

    A stored result is used until the weight changes or ``drop`` is called. A change is
    detected by the weight's version, which every in-place operator raises, or by its
    memory. A write through ``.data`` isn't detected. So call ``drop`` before other code
    gets the weight.
    """

    def __init__(self, rounding: Rounding) -> None:
        self.kept = False
        self._rounding = rounding
        self._both: tuple[Float8Blocks, Float8Blocks] | None = None
        self._of: tuple[Any, ...] = ()  # state of the weight that was rounded
        self._memory: Any = None  # kept, so that no other tensor gets its address

    def by_rows(self, weight: Tensor) -> Float8Blocks:
        return self._sides(weight)[0] if self.kept else self._rounding.by_rows(weight, True)

    def by_columns(self, weight: Tensor) -> Float8Blocks:
        return self._sides(weight)[1] if self.kept else self._rounding.by_columns(weight, True)

    def drop(self) -> bool:
        """Frees the rounded weight; returns True if there was one."""
        had_copy = self._both is not None
        self._both, self._of, self._memory = None, (), None
        return had_copy

    def _sides(self, weight: Tensor) -> tuple[Float8Blocks, Float8Blocks]:
        memory = weight.untyped_storage()
        state = memory._cdata, weight.storage_offset(), weight.dtype, _version(weight)
        if self._both is None or self._of != state:
            self.drop()  # before the new one takes memory
            self._both = self._rounding.by_both(weight, True)
            self._of, self._memory = state, memory
        return self._both


class Float8Input(NamedTuple):
    """A layer's input in float8, rounded by rows and, if the weight is trained, by columns."""

    rows: Float8Blocks
    columns: Float8Blocks | None

    @classmethod
    def of(cls, x: Tensor, rounding: Rounding, learns: bool) -> Float8Input:
        """Rounds ``x`` (.., in), flattened to rows; ``learns``: the weight is trained."""
        flat = x.detach().reshape(-1, x.shape[-1])
        if not learns:
            return cls(rounding.by_rows(flat), None)
        if is_thrown_away() and rounding.in_one_pass(flat):
            # This forward's saved tensors are thrown away, so the columns are only placeholders.
            return cls(rounding.by_rows(flat), _by_row(*quantised_gpu.empty_columns(flat, E4M3)))
        return cls(*rounding.by_both(flat))


class _QuantisedLinear(torch.autograd.Function):
    """The three products of a linear layer in float8; gradients that aren't needed are skipped.

    For the weight's gradient the input is saved in float8, a byte per number.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rounded: Float8Input,
        of_weight: Float8Weight,
        rounding: Rounding,
        dtype: torch.dtype,
    ) -> Tensor:
        columns = rounded.columns
        ctx.save_for_backward(weight, *(() if columns is None else columns[:2]))
        ctx.block = None if columns is None else columns.block
        ctx.rounding, ctx.of_weight, ctx.like = rounding, of_weight, (x.shape, x.dtype)
        y = rounding.product(rounded.rows, of_weight.by_rows(weight), dtype)
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, *columns = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        dy = gradients[0].reshape(-1, weight.shape[0])
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        if needs_dx and needs_dw:
            rows, turned = rounding.by_both(dy)
        elif needs_dx:
            rows = rounding.by_rows(dy)
        elif needs_dw:
            turned = rounding.by_columns(dy)
        if needs_dx:
            shape, dtype = ctx.like
            dx = rounding.product(rows, ctx.of_weight.by_columns(weight), dtype).reshape(shape)
        if needs_dw:
            data, scale = columns
            dw = rounding.product(turned, Float8Blocks(data, scale, ctx.block), weight.dtype)
        return dx, dw, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rounding: Rounding,
    *,
    rounded: Float8Input | None = None,
    of_weight: Float8Weight | None = None,
) -> Tensor:
    """Returns ``F.linear`` with float8 products, in the format of autocast or of ``x``.

    Args:
        rounded: ``x`` in float8, if another layer has rounded the same input.
        of_weight: rounds the weight, and may store the result.
    """
    dtype = autocast_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        rounded = rounded or Float8Input.of(x, rounding, learns(weight))
        of_weight = of_weight or Float8Weight(rounding)
        y: Tensor = _QuantisedLinear.apply(x, weight, rounded, of_weight, rounding, dtype)
    return y if bias is None else y + bias.to(dtype)


def learns(weight: Tensor) -> bool:
    """Returns True if a backward pass will need the weight's gradient."""
    return bool(weight.requires_grad) and torch.is_grad_enabled()


class Float8Layers:
    """Gives a module's linear layers float8 products, and removes them again."""

    def __init__(self, recipe: Recipe = "rowwise", emulate: bool = False) -> None:
        if recipe not in RECIPES:
            raise ValueError(f"recipe {recipe!r} is unknown; supported: rowwise and blockwise")
        if recipe == "blockwise" and not emulate:
            raise ValueError("blockwise float8 is emulated only: set emulate, or use rowwise")
        self.recipe, self.emulate = recipe, emulate
        self._rounding = Rounding(recipe, emulate)
        self._weights: list[Float8Weight] = []
        self._last = _LastInput()
        self.have_kept = False  # True once a rounded weight was stored for several passes
        self.names: list[str] = []  # layers that compute in float8
        self.left: list[str] = []  # layers left unchanged: the hardware doesn't support their sides
        self.ran: set[str] = set()  # layers that ran in float8
        self._bound: list[tuple[nn.Linear, Any]] = []  # each with the function bound before

    def attach(self, module: nn.Module) -> None:
        """Binds the products to the instances; parameters and their names are unchanged.

        Raises:
            ValueError: no layer has supported sides.
        """
        for name, layer in module.named_modules():
            last = name.removesuffix(".base_layer").rpartition(".")[2]  # wrapped by an adapter
            if not isinstance(layer, nn.Linear) or not is_plain_linear(layer):
                continue
            if last in KEPT_WIDE or "lora_" in name:
                continue
            if any(side % SIDE for side in layer.weight.shape):
                self.left.append(name)
                continue
            self.names.append(name)
            self._bound.append((layer, vars(layer).get("forward")))
            self._weights.append(Float8Weight(self._rounding))
            layer.forward = partial(self._forward, name, layer, self._weights[-1])
        if not self.names:
            raise ValueError(
                f"no linear layer has sides that are multiples of {SIDE}; layers of a base in few "
                "bits, heads and routers don't count"
            )

    def detach(self) -> None:
        for layer, before in self._bound:
            del layer.forward
            if before is not None:
                layer.forward = before
        self._bound.clear()
        self.keep_weights(False)
        self._weights.clear()

    def keep_weights(self, enabled: bool) -> None:
        """Rounds each weight once, from True until False; takes 2 bytes per number.

        Between the two calls nothing may write to a weight through its ``.data``.
        """
        for weight in self._weights:
            weight.kept = enabled
            if not enabled:
                self.have_kept |= weight.drop()

    def _forward(self, name: str, layer: nn.Linear, of_weight: Float8Weight, x: Tensor) -> Tensor:
        if is_refused(SCALED_MM) and not self.emulate:
            return F.linear(x, layer.weight, layer.bias)
        self.ran.add(name)
        rounded = self._last.of(x, self._rounding, learns(layer.weight))
        arguments = x, layer.weight, layer.bias, self._rounding
        return linear(*arguments, rounded=rounded, of_weight=of_weight)


class _LastInput:
    """Rounds an input once if several layers read it one after the other.

    Such are query, key and value of an attention, and gate and up of an MLP. The result is
    stored until the input is freed or another input comes.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._state = (0, False)  # (version, True if the pass's saved tensors are thrown away)
        self._rounded_input: Float8Input | None = None

    def of(self, x: Tensor, rounding: Rounding, learns: bool) -> Float8Input | None:
        """Returns ``x`` in float8; None if it can't be kept."""
        if torch.compiler.is_compiling() or x.is_inference():  # inference tensors have no version
            return None
        state = _version(x), is_thrown_away()
        same = self._of is not None and self._of() is x and self._state == state
        if (
            not same
            or self._rounded_input is None
            or (learns and self._rounded_input.columns is None)
        ):
            self._forget()
            with torch.no_grad():
                self._rounded_input = Float8Input.of(x, rounding, learns)
            self._of, self._state = weakref.ref(x, self._forget), state
        return self._rounded_input

    def _forget(self, _: Any = None) -> None:
        self._of, self._rounded_input = None, None

    def __reduce__(self) -> Any:
        return _LastInput, ()  # a copy of the model starts without one


def _version(x: Tensor) -> int:
    """Returns how often operators have written to a tensor in place."""
    version: int = x._version
    return version


def _in_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns the zero-padded matrix as (row blocks, block rows, column blocks, columns)."""
    rows, columns = block
    right, below = -x.shape[1] % columns, -x.shape[0] % rows
    padded = F.pad(x, (0, right, 0, below)) if right or below else x  # empty padding copies too
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
