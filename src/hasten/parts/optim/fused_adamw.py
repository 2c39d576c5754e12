"""AdamW in one pass over memory: clipping, moments, decay, update, rounded copy.

The time of an update of a hundred million weights is all memory. Each number is read,
used once and written back. Clipping gradients, widening them to float32 and rounding
the new masters to bf16 would be three more passes. Here they happen while the numbers
are in the register. The rule is AdamW's (Loshchilov and Hutter, arXiv:1711.05101), as
in torch. A processor runs a loop in C++ for each tensor, an NVIDIA GPU one kernel in
Triton for all of them.

    optimizer = FusedAdamW(model.parameters(), lr=3e-4)
    optimizer.grad_scale = torch.tensor(2.0)     # optional: gradients are divided by it
    optimizer.write_copies([(bf16_copy, master)])  # optional: also writes the weights in bf16
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten.parts.kernels import adamw, rowwise


class KernelAdamW(Optimizer):
    """AdamW with one kernel for all supported tensors, and a loop for each of the others."""

    grad_scale: Tensor | None  # gradients are divided by it if it is set
    # (weight, its group, its index among all) -> the kernel's update; the loop's update.
    _planned: Callable[[Tensor, dict[str, Any], int], adamw.TensorUpdate]
    _update: Callable[[Tensor, dict[str, Any], int, Tensor | None], None]

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._copies: dict[int, Tensor] = {}  # by id of the weight

    def write_copies(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Writes the weights, rounded to bf16, into the first of each pair in each later step.

        False: it can't, since a copy isn't bf16 or is laid out in another way.
        """
        if not all(adamw.writes(copy, weight) for copy, weight in pairs):
            return False
        self._copies = {id(weight): copy for copy, weight in pairs}
        return True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights that have a gradient; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor, skipped = divisor_and_skip(self)
        if skipped:
            return loss
        updates: dict[torch.device, list[adamw.TensorUpdate]] = {}
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for index, (weight, group) in enumerate(weights):
            if weight.grad is None:
                continue
            if self._by_kernel(weight):
                one = self._planned(weight, group, index)
                updates.setdefault(weight.device, []).append(one)
            else:
                self._update(weight, group, index, divisor)
        for of_device in updates.values():
            adamw.update(of_device, divisor)
        return loss

    def _by_kernel(self, weight: Tensor) -> bool:
        return adamw.takes(weight)


class FusedAdamW(KernelAdamW):
    """AdamW for float32 weights on a processor or a GPU; gradients in float32 or bf16.

    Args:
        params: parameters or groups, as torch's optimizers take them.
        settings: lr, betas, eps, weight_decay, as in torch.

    Raises:
        ValueError: a setting out of range.
        RuntimeError: the kernels can't run where the parameters are (:func:`why_not`).
    """

    _step_supports_amp_scaling = True  # grad_scale divides the gradients, as in torch's fused ones

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            if reason := why_not(device):
                raise RuntimeError(reason)

    def _update(
        self, weight: Tensor, group: dict[str, Any], index: int, divisor: Tensor | None
    ) -> None:
        one = self._planned(weight, group, index)
        if weight.device.type != "cpu":  # a device with a refused kernel
            adamw.reference_update(one, divisor)
        else:
            factor = 1.0 if divisor is None else 1 / divisor.item()
            rowwise.adamw_(*one[:4], one.copy, (*one.rule, factor))

    def _planned(self, weight: Tensor, group: dict[str, Any], index: int) -> adamw.TensorUpdate:
        if weight.dtype != torch.float32 or why_not(weight.device):
            raise ValueError(
                f"fused AdamW moves float32 weights on a processor or an NVIDIA GPU, not "
                f"{weight.dtype} on {weight.device}; leave it out of the plan"
            )
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(weight),
                torch.zeros_like(weight),
            )
        if state["step"].device.type != "cpu":  # torch's fused AdamW stores it there; read once
            state["step"] = state["step"].cpu()
        state["step"] += 1
        grad = weight.grad
        if grad.stride() != weight.stride():  # one pass over plain memory needs equal strides
            grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
        return adamw.TensorUpdate(
            weight.detach(),
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            adamw.rule_of(group, int(state["step"].item())),  # read on the host
            copy=self._copies.get(id(weight)),
        )


def why_not(device: str | torch.device) -> str:
    """Returns why the pass can't run on a device, in one sentence; empty if it can."""
    if torch.device(device).type == "cpu":
        return rowwise.library().reason
    return adamw.why_not(device)


def divisor_and_skip(optimizer: Any) -> tuple[Tensor | None, bool]:
    """Returns the divisor of this step's gradients, and True if the step is skipped.

    ``torch.amp.GradScaler`` passes both to an optimizer that divides gradients itself. It
    uses two attributes that it removes after the step. A ``grad_scale`` set by other code
    is used once.
    """
    divisor, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    if overflow is not None:
        return divisor, bool(overflow.item())  # the scaler also reads it for other optimizers
    if hasattr(optimizer, "grad_scale"):
        del optimizer.grad_scale
    return divisor, False
