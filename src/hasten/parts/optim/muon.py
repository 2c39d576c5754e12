"""Muon for a model's hidden matrices and AdamW for its other weights, in one object.

Muon replaces a matrix's momentum by the nearest matrix with equal singular values. So
no direction of the weight learns slower than another (Jordan et al., 2024,
kellerjordan.github.io/posts/muon). Scaled by 0.2 sqrt(max(rows, columns)) the update
has the size of AdamW's. AdamW's learning rate and weight decay can then be used.
Source: Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.2.

Embeddings, head, norms and biases stay with AdamW. A stack of matrices (experts, rows,
columns) is one matrix per expert. The state of a matrix is one momentum, half of
AdamW's.

torch.optim.Muon does the same for matrices alone. Here one optimizer has both kinds of
groups, so schedules, clipping and checkpoints handle one object. Stacks of experts are
supported too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's iteration: steep at 0, within 0.7..1.2 after
ITERATIONS = 5
OUTER = ("embed", "lm_head", "wte", "wpe", "embeddings")  # in names of embeddings and heads


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Returns True if a weight is a matrix (or a stack) between embeddings and head."""
    bias = name.rsplit(".", 1)[-1].endswith("bias")
    return parameter.ndim in (2, 3) and not bias and not any(word in name for word in OUTER)


def orthogonalised(matrices: Tensor) -> Tensor:
    """The last two dimensions with singular values near 1, by five Newton-Schulz steps.

    bf16 on a GPU, as the authors do; on a processor float32, which is not slower there.
    """
    a, b, c = COEFFICIENTS
    iterate = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    tall = iterate.shape[-2] > iterate.shape[-1]
    if tall:  # the smaller product
        iterate = iterate.mT
    iterate = iterate / iterate.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = iterate @ iterate.mT
        iterate = a * iterate + (b * gram + c * gram @ gram) @ iterate
    return (iterate.mT if tall else iterate).to(matrices.dtype)


class MuonAdamW(Optimizer):
    """Optimizer: Muon moves groups with ``muon: True``, AdamW the others.

    Args:
        groups: parameter groups; a group without ``muon`` is AdamW's.
        momentum: Muon's, Nesterov's form.

    Raises:
        ValueError: a parameter that isn't a matrix in a group of Muon's, or a setting out
            of range.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        momentum: float = 0.95,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}; it must be in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # The groups get all of AdamW's keys from it, so that its step() can work on them.
        plain = AdamW([{**g, "params": list(g["params"])} for g in groups], **defaults)
        super().__init__(plain.param_groups, {**plain.defaults, "muon": False})
        self.momentum = momentum
        self._plain = plain
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"] and parameter.ndim not in (2, 3):
                    raise ValueError(
                        f"Muon moves matrices and stacks of them, not a tensor of shape "
                        f"{tuple(parameter.shape)}; put it into a group without muon"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._turn(parameter, group)
        # Groups and state may have been exchanged since (loading, master weights).
        self._plain.param_groups = [g for g in self.param_groups if not g["muon"]]
        self._plain.state = self.state
        if self._plain.param_groups:
            self._plain.step()
        return loss

    def _turn(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        grad, moment = parameter.grad, state["momentum"]
        assert grad is not None
        moment.lerp_(grad, 1 - self.momentum)
        update = orthogonalised(grad.lerp(moment, self.momentum))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        size = 0.2 * math.sqrt(max(parameter.shape[-2:]))
        parameter.add_(update, alpha=-group["lr"] * size)


def muon_groups(
    groups: Iterable[dict[str, Any]], named: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Each group in two where it needs to be: hidden matrices with ``muon: True``, and the rest."""
    hidden = {id(p) for name, p in named if is_hidden_matrix(name, p)}
    new_groups = []
    for group in groups:
        for muon in (True, False):
            members = [p for p in group["params"] if (id(p) in hidden) == muon]
            if members:
                new_groups.append({**group, "params": members, "muon": muon})
    return new_groups
