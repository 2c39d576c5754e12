"""AdamW whose two moments take four bytes per weight, or two, in the place of eight.

The update is AdamW's (Loshchilov and Hutter, arXiv:1711.05101) in float32; between two steps the
moments of matrices are kept as bf16, rounded at random, or in 8 bits. Norms and biases keep float32
moments: they are few, and they matter.

One tensor at a time, a chunk at a time, so that no float32 copy of the whole state ever exists:
(1) moments come back as float32 => (2) the gradient goes in => (3) the weights move by what is
exact at this moment => (4) the moments are rounded for the next step.

The dice of (4) are thrown by seed, place of the tensor and step, so a resumed run rounds as an
uninterrupted one, and every rank as its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

# Moments in few bits: rounding that keeps the mean, and numbers of 8 bits in blocks.
#
# bf16 has 8 bits of mantissa, so a running mean that moves by less than 1/256 of itself per step
# stands still under rounding to the nearest. Rounded up or down at random, in proportion to the
# distance, it is right in the mean (Gupta et al., Deep Learning with Limited Numerical Precision,
# arXiv:1502.02551).
#
# 8 bits follow Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861: 256
# values share one float32 scale, their largest, and each is the place in a fixed table whose steps
# are fine near 1 and coarse near 0. Two things differ from the paper. The table of second moments
# is squared, because they are squares: it reaches down to 1e-13 of the largest in place of 3e-7.
# And they are rounded at random, because at beta2 = 0.999 they move less per step than the table's
# steps.
#
# The noise comes from the caller, so that who knows seed and step knows every rounding.

BLOCK = 256  # values that share a scale
TINY = torch.finfo(torch.float32).tiny
DECADES = 7  # that a table covers below 1


def noise(count: int, generator: torch.Generator) -> Tensor:
    """``count`` whole numbers from 0 to 65535 as int32, four from each word that is drawn."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].to(torch.int32) & 0xFFFF


def to_bf16(values: Tensor, dice: Tensor) -> Tensor:
    """float32 rounded to one of its two bf16 neighbours, right in the mean.

    The lower 16 bits are the distance to the neighbour below, in 65536ths of the gap.
    """
    bits = values.contiguous().view(torch.int32) + dice
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


@functools.cache
def signed_table(device: torch.device) -> Tensor:
    """256 values from -1 to 1 with 0: 2^i midpoints of the i-th decade on either side."""
    half = [v for i in range(DECADES) for v in _midpoints(i, 2**i)]
    return torch.tensor(sorted([0.0, 1.0, *half, *(-v for v in half)]), device=device)


@functools.cache
def squared_table(device: torch.device) -> Tensor:
    """256 values from 0 to 1: the squares of 2^(i+1) midpoints of the i-th decade."""
    half = [v for i in range(DECADES) for v in _midpoints(i, 2 ** (i + 1))]
    return torch.tensor(sorted([0.0, 1.0, *(v * v for v in half)]), device=device)


def _midpoints(decade: int, count: int) -> list[float]:
    scale = 10.0 ** (decade - DECADES + 1)
    width = 0.9 / count
    return [scale * (0.1 + width * (i + 0.5)) for i in range(count)]


def blocks(count: int) -> int:
    """Blocks for so many values; the last may be part empty."""
    return -(-count // BLOCK)


def quantised_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """(places in the table as uint8, a scale per block) of flat float32 values, to the nearest."""
    table = signed_table(values.device)
    shares, scales = _shares(values)
    borders = (table[1:] + table[:-1]) / 2
    return below(shares, borders, _starts("signed", values.device)).to(torch.uint8), scales


def quantised_squares(values: Tensor, dice: Tensor) -> tuple[Tensor, Tensor]:
    """The same of values that aren't negative, right in the mean.

    A value that isn't 0 is never stored as 0: its square root is what a step is divided by.
    """
    table = squared_table(values.device)
    shares, scales = _shares(values)
    above = below(shares, table, _starts("squared", values.device)).clamp_(1, 255)
    low, high = table.index_select(0, above - 1), table.index_select(0, above)
    flat = shares.flatten()
    chance = (flat - low) / (high - low) * 65536
    dice = _in_whole_blocks(dice)
    places = above - 1 + (dice < chance)
    return torch.maximum(places, flat > 0).to(torch.uint8), scales


def below(shares: Tensor, borders: Tensor, starts: Tensor) -> Tensor:
    """How many of the sorted borders lie below each value, flat: a binary search, 20 times faster.

    A number's upper 16 bits say how many lie below the smallest number with these bits; no two
    borders of our tables share their upper bits, so one comparison settles the rest.
    """
    flat = shares.flatten()
    start = starts.index_select(0, (flat.view(torch.int32) >> 16) & 0xFFFF)
    following = F.pad(borders, (0, 1), value=torch.inf).index_select(0, start)
    return start + (following < flat)


@functools.cache
def _starts(kind: str, device: torch.device) -> Tensor:
    """For all upper halves of a float32, the borders below the smallest number that has it."""
    cpu = torch.device("cpu")
    table = signed_table(cpu) if kind == "signed" else squared_table(cpu)
    borders = (table[1:] + table[:-1]) / 2 if kind == "signed" else table
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(2**15) << 16
    smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    found = torch.searchsorted(borders, smallest.nan_to_num(2.0))
    return found.to(torch.int32).to(device)


def values_of(places: Tensor, scales: Tensor, table: Tensor, count: int) -> Tensor:
    """The first ``count`` values that places and scales stand for, flat, float32."""
    found = table.index_select(0, places.to(torch.int32)).view(-1, BLOCK) * scales[:, None]
    return found.flatten()[:count]


def _in_whole_blocks(values: Tensor) -> Tensor:
    """Filled up with zeros; itself where nothing is missing, since a pad by nothing copies too."""
    missing = -len(values) % BLOCK
    return F.pad(values, (0, missing)) if missing else values


def _shares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as shares of the largest of their block, (blocks, 256), and those largest."""
    rows = _in_whole_blocks(values).view(-1, BLOCK)
    scales = rows.abs().amax(1)
    return rows / scales.clamp_min(TINY)[:, None], scales


FORMATS = ("bf16", "int8")
CHUNK = {"cpu": 2**16}  # values at once: what a core's cache holds
CHUNK_ELSEWHERE = 2**24
State = dict[str, Any]


class CompactAdamW(Optimizer):
    """AdamW with moments in ``bf16`` or ``int8``.

    Args:
        params: parameters or groups, as torch's optimizers take them.
        moments: how moments of matrices are kept between steps.
        seed: of the rounding.

    Raises:
        ValueError: an unknown format, or a setting out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: str = "bf16",
        seed: int = 0,
    ) -> None:
        if moments not in FORMATS:
            raise ValueError(f"moments is {moments!r}; it is one of {', '.join(FORMATS)}")
        if lr < 0 or eps <= 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError("lr and weight_decay can't be negative; betas lie in [0, 1), eps > 0")
        self.moments, self.seed = moments, seed
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, place)
                place += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; but moments keep the format they were saved in, which torch would widen.

        Raises:
            ValueError: the state has other moments than this optimizer.
        """
        saved = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        here = list(chain.from_iterable(g["params"] for g in self.param_groups))
        for index, parameter in zip(saved, here, strict=False):
            names = set(state_dict["state"].get(index, ()))
            expected = set(self._fresh(parameter)) if names else names
            if names != expected:
                raise ValueError(
                    f"the optimizer's state holds {', '.join(sorted(names))}, and moments="
                    f"{self.moments!r} needs {', '.join(sorted(expected))}: load it with the "
                    "setting that wrote it"
                )
        super().load_state_dict(state_dict)
        here = list(chain.from_iterable(g["params"] for g in self.param_groups))
        for index, parameter in zip(saved, here, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    value = value.to(parameter.device, copy=True)
                self.state[parameter][name] = value

    def _update(self, parameter: Tensor, group: dict[str, Any], place: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._fresh(parameter))
        state["step"] += 1
        grad = parameter.grad
        assert grad is not None
        dice = self._dice(parameter.device, place, state["step"])
        whole = parameter.detach().contiguous()  # itself, but for a weight with odd strides
        weights, grads = whole.view(-1), grad.contiguous().view(-1)
        chunk = CHUNK.get(parameter.device.type, CHUNK_ELSEWHERE)
        for start in range(0, len(weights), chunk):
            part = slice(start, min(start + chunk, len(weights)))
            first, second = _moments(state, part)
            _adamw(weights[part], grads[part].float(), first, second, group, state["step"])
            _keep(state, part, first, second, dice)
        if whole.data_ptr() != parameter.data_ptr():
            parameter.copy_(whole)

    def _fresh(self, parameter: Tensor) -> State:
        count, device = parameter.numel(), parameter.device
        if parameter.ndim >= 2 and self.moments == "int8":
            size = blocks(count)
            return {
                "step": 0,
                "first": torch.full((size * BLOCK,), _zero(), dtype=torch.uint8, device=device),
                "second": torch.zeros(size * BLOCK, dtype=torch.uint8, device=device),
                "first_scale": torch.zeros(size, device=device),
                "second_scale": torch.zeros(size, device=device),
            }
        dtype = torch.bfloat16 if parameter.ndim >= 2 else torch.float32
        first = torch.zeros(count, dtype=dtype, device=device)
        return {"step": 0, "first": first, "second": torch.zeros_like(first)}

    def _dice(self, device: torch.device, place: int, step: int) -> torch.Generator:
        """A generator that seed, tensor and step alone decide."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        mixed = (self.seed * 1_000_003 + place) * 0x9E3779B97F4A7C15 + step
        return self._generators[device].manual_seed(mixed % 2**63)


def _adamw(
    weights: Tensor, grads: Tensor, first: Tensor, second: Tensor, group: State, step: int
) -> None:
    """The update on flat tensors, in place; ``first`` and ``second`` are float32."""
    beta1, beta2 = group["betas"]
    first.lerp_(grads, 1 - beta1)
    second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    width = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    if group["weight_decay"]:
        weights.mul_(1 - group["lr"] * group["weight_decay"])
    weights.addcdiv_(first, width, value=-group["lr"] / (1 - beta1**step))


def _moments(state: State, part: slice) -> tuple[Tensor, Tensor]:
    """Both moments of a chunk as float32 of their own, or the state's where it is float32."""
    first, second = state["first"], state["second"]
    if "first_scale" not in state:
        return first[part].float(), second[part].float()
    count, device = part.stop - part.start, first.device
    rows = _rows(part)
    cells = slice(rows.start * BLOCK, rows.stop * BLOCK)
    return (
        values_of(first[cells], state["first_scale"][rows], signed_table(device), count),
        values_of(second[cells], state["second_scale"][rows], squared_table(device), count),
    )


def _keep(state: State, part: slice, first: Tensor, second: Tensor, dice: torch.Generator) -> None:
    """Round a chunk's moments into the state."""
    count = part.stop - part.start
    if "first_scale" in state:
        rows = _rows(part)
        cells = slice(rows.start * BLOCK, rows.stop * BLOCK)
        state["first"][cells], state["first_scale"][rows] = quantised_signed(first)
        state["second"][cells], state["second_scale"][rows] = quantised_squares(
            second, noise(count, dice)
        )
    elif state["first"].dtype is torch.bfloat16:
        state["first"][part] = to_bf16(first, noise(count, dice))
        state["second"][part] = to_bf16(second, noise(count, dice))


def _rows(part: slice) -> slice:
    """The blocks of a chunk, which begins at a block."""
    return slice(part.start // BLOCK, blocks(part.stop))


def _zero() -> int:
    """The place of 0 in the table of first moments."""
    return int((signed_table(torch.device("cpu")) == 0).nonzero())
