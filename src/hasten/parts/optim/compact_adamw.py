"""AdamW with two moments in four bytes per weight, or two, instead of eight.

The update is AdamW's (Loshchilov and Hutter, arXiv:1711.05101) in float32. Between two
steps the moments of matrices are stored as bf16, rounded at random, or in 8 bits. Norms
and biases keep float32 moments: they are few and important. Weights in bf16 without
float32 masters are rounded at random as well. An update is often smaller than half a
step of bf16 and would vanish.

On a GPU one kernel does all of it (`hasten.parts.kernels.adamw`). Elsewhere, and if the
kernel is refused, it runs one tensor at a time, a chunk at a time. So no float32 copy
of the whole state ever exists:

(1) Moments are converted to float32.
(2) The gradient is added.
(3) The weights move by the moments before rounding.
(4) Moments, and weights in bf16, are rounded.

The random bits of (4) depend on seed, position of the tensor and step. So a resumed run
rounds like an uninterrupted one, and every rank like its neighbours. The kernel uses
other random bits than the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hasten.parts.kernels import adamw
from hasten.parts.kernels.low_bit import (
    BLOCK,
    blocks,
    noise,
    quantised_signed,
    quantised_squares,
    signed_table,
    squared_table,
    to_bf16,
    values_of,
)
from hasten.parts.optim.fused_adamw import KernelAdamW
from hasten.parts.optim.master_weights import put_formats_back

FORMATS = ("bf16", "int8")
CHUNK = {"cpu": 2**16}  # elements at a time that fit in a core's cache
CHUNK_ELSEWHERE = 2**24
State = dict[str, Any]


class CompactAdamW(KernelAdamW):
    """AdamW with moments in ``bf16`` or ``int8``.

    Args:
        params: parameters or groups, as torch's optimizers take them.
        moments: how moments of matrices are kept between steps.
        seed: of the rounding.
        settings: lr, betas, eps, weight_decay, as in torch.

    Raises:
        ValueError: an unknown format, or a setting out of range.
    """

    def __init__(
        self, params: Iterable[Any], *, moments: str = "bf16", seed: int = 0, **settings: Any
    ) -> None:
        if moments not in FORMATS:
            raise ValueError(f"moments is {moments!r}; it is one of {', '.join(FORMATS)}")
        if settings.get("eps") == 0:
            raise ValueError("eps is 0; give more, since moments are rounded")
        self.moments, self.seed = moments, seed
        super().__init__(params, **settings)
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Returns True if a kernel divides gradients by ``grad_scale`` in the update itself."""
        return all(self._by_kernel(p) for group in self.param_groups for p in group["params"])

    def write_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Writes the rounded weights into the first of each pair, if a kernel updates all weights.

        False: they aren't written.
        """
        return all(self._by_kernel(weight) for _, weight in pairs) and super().write_copies(pairs)

    def _by_kernel(self, weight: Tensor) -> bool:
        form = adamw.COMPACT if weight.ndim >= 2 else adamw.PLAIN
        return weight.is_contiguous() and adamw.takes(weight, form)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state like torch's, but moments keep their saved format.

        torch would widen them.

        Raises:
            ValueError: the state has other moments than this optimizer.
        """
        saved = list(chain.from_iterable(g["params"] for g in state_dict["param_groups"]))
        parameters = list(chain.from_iterable(g["params"] for g in self.param_groups))
        for index, parameter in zip(saved, parameters, strict=False):
            values = state_dict["state"].get(index, {})
            fresh = self._fresh(parameter) if values else {}
            names, expected = set(values), set(fresh)
            if names != expected:
                raise ValueError(
                    f"the optimizer's state holds {', '.join(sorted(names))}, and moments="
                    f"{self.moments!r} needs {', '.join(sorted(expected))}: load it with the "
                    "setting that wrote it"
                )
            for name, like in fresh.items():
                if isinstance(like, Tensor) and getattr(values[name], "shape", None) != like.shape:
                    raise ValueError(
                        f"the optimizer's {name} of weight {index} is not a tensor of shape "
                        f"{[*like.shape]}: load the state of the same weights"
                    )
        super().load_state_dict(state_dict)
        put_formats_back(self, state_dict)

    def _planned(self, weight: Tensor, group: State, index: int) -> adamw.TensorUpdate:
        state, copy, grad = self._next(weight), self._copies.get(id(weight)), weight.grad
        assert grad is not None
        scales = (state["first_scale"], state["second_scale"]) if "first_scale" in state else None
        return adamw.TensorUpdate(
            weight.detach().view(-1),
            grad.contiguous().view(-1),
            state["first"],
            state["second"],
            adamw.rule_of(group, state["step"]),
            scales,
            None if copy is None else copy.detach().view(-1),
            adamw.dice_key(self.seed, index, state["step"]),
        )

    def _update(self, weight: Tensor, group: State, index: int, divisor: Tensor | None) -> None:
        state, grad = self._next(weight), weight.grad
        assert grad is not None
        dice = self._dice(weight.device, index, state["step"])
        contiguous = weight.detach().contiguous()  # itself, unless it has unusual strides
        flat, grads = contiguous.view(-1), grad.contiguous().view(-1)
        in_bf16 = flat.dtype is torch.bfloat16
        chunk = CHUNK.get(weight.device.type, CHUNK_ELSEWHERE)
        for start in range(0, len(flat), chunk):
            part = slice(start, min(start + chunk, len(flat)))
            first, second = _moments(state, part)
            gradient = grads[part].float() if divisor is None else grads[part].float() / divisor
            moved = flat[part].float() if in_bf16 else flat[part]
            step = state["step"]
            beta1, beta2 = group["betas"]
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            width = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
            if group["weight_decay"]:
                moved.mul_(1 - group["lr"] * group["weight_decay"])
            moved.addcdiv_(first, width, value=-group["lr"] / (1 - beta1**step))
            # Rounds a chunk's moments into the state.
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
            if in_bf16:
                flat[part] = to_bf16(moved, noise(len(moved), dice))
        if not weight.is_contiguous():
            weight.copy_(contiguous)
        if (copy := self._copies.get(id(weight))) is not None:
            copy.copy_(weight)

    def _next(self, parameter: Tensor) -> State:
        """Returns a parameter's state with the count of the next step."""
        state: State = self.state[parameter]
        if not state:
            state.update(self._fresh(parameter))
        state["step"] += 1
        return state

    def _fresh(self, parameter: Tensor) -> State:
        count, device = parameter.numel(), parameter.device
        if parameter.ndim >= 2 and self.moments == "int8":
            size = blocks(count)
            zero = int((signed_table(torch.device("cpu")) == 0).nonzero())  # code of zero
            return {
                "step": 0,
                "first": torch.full((size * BLOCK,), zero, dtype=torch.uint8, device=device),
                "second": torch.zeros(size * BLOCK, dtype=torch.uint8, device=device),
                "first_scale": torch.zeros(size, device=device),
                "second_scale": torch.zeros(size, device=device),
            }
        dtype = torch.bfloat16 if parameter.ndim >= 2 else torch.float32
        first = torch.zeros(count, dtype=dtype, device=device)
        return {"step": 0, "first": first, "second": torch.zeros_like(first)}

    def _dice(self, device: torch.device, index: int, step: int) -> torch.Generator:
        """Returns a random generator that depends only on seed, tensor and step."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        mixed = (self.seed * 1_000_003 + index) * 0x9E3779B97F4A7C15 + step
        return self._generators[device].manual_seed(mixed % 2**63)


def _moments(state: State, part: slice) -> tuple[Tensor, Tensor]:
    """Returns both moments of a chunk as new float32 tensors, or the state's own if float32."""
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


def _rows(part: slice) -> slice:
    """Returns the blocks of a chunk, which begins at a block."""
    return slice(part.start // BLOCK, blocks(part.stop))
