"""AdamW in one pass over memory: clipping, moments, weight decay, update, and the rounded copy.

An update of a hundred million weights is all memory: each number it needs is read, used once and
written back. Clipping gradients, widening them to float32 and rounding the new masters to bf16 are
three more passes where they stand alone; here they happen while the numbers are in the register.
The rule is AdamW's (Loshchilov and Hutter, arXiv:1711.05101), as torch's own has it.

    optimizer = FusedAdamW(model.parameters(), lr=3e-4)
    optimizer.grad_scale = torch.tensor(2.0)     # optional: gradients are divided by it
    optimizer.write_copies([(bf16_copy, master)])  # optional: who wants the weights in bf16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten.parts.kernels import rowwise


class FusedAdamW(Optimizer):
    """AdamW for float32 weights on a processor; gradients in float32 or bf16.

    Args:
        params: parameters or groups, as torch's optimizers take them.

    Raises:
        ValueError: a setting out of range.
        RuntimeError: the kernels can't be compiled here (``rows.library().reason``).
    """

    _step_supports_amp_scaling = True  # grad_scale divides the gradients, as in torch's fused ones

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError(
                f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative, and "
                f"betas {betas} lie in [0, 1)"
            )
        if rowwise.library().library is None:
            raise RuntimeError(rowwise.library().reason)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.grad_scale: Tensor | None = None
        self._copies: dict[int, Tensor] = {}  # by id of the weight

    def write_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Each step also writes the weights, rounded to bf16, into the first of each pair."""
        self._copies = {id(weight): copy for copy, weight in pairs}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the weights that have a gradient; returns what ``closure`` returned."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        divisor = 1.0 if self.grad_scale is None else self.grad_scale.item()
        self.grad_scale = None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group, 1 / divisor)
        return found

    def _move(self, weight: Tensor, group: dict[str, Any], factor: float) -> None:
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"fused AdamW moves float32 weights on a processor, not {weight.dtype} on "
                f"{weight.device}; leave it out of the plan"
            )
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(weight),
                torch.zeros_like(weight),
            )
        state["step"] += 1
        steps, (beta1, beta2) = state["step"].item(), group["betas"]
        rule = (
            group["lr"] / (1 - beta1**steps),
            1 - group["lr"] * group["weight_decay"],
            *(beta1, beta2),
            1 / math.sqrt(1 - beta2**steps),
            group["eps"],
            factor,
        )
        grad = _laid_out_as(weight, weight.grad)
        moments = state["exp_avg"], state["exp_avg_sq"]
        rowwise.adamw_(weight, grad, *moments, self._copies.get(id(weight)), rule)


def _laid_out_as(weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient with its numbers in the order of the weight's: the pass is over plain memory."""
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
