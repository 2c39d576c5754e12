"""Muon for a model's hidden matrices and AdamW for its other weights, in one object.

Muon replaces a matrix's momentum by the nearest matrix with equal singular values. So
no direction of the weight learns slower than another (Jordan et al., 2024,
kellerjordan.github.io/posts/muon). Scaled by 0.2 sqrt(max(rows, columns)) the update
has the size of AdamW's. AdamW's learning rate and weight decay can then be used.
Source: Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.2.

Embeddings, head, norms and biases stay with AdamW. The state of a matrix is one
momentum, half of AdamW's.

A parameter may have several matrices: one per expert, or the projections of a fused
weight, one below another. Examples are gate and up, or query, key and value. Each is
updated separately, as if it were a parameter. Their sizes follow from the layer's other
weights. A fused weight of unknown form stays with AdamW, with a warning.
``kv_a_proj_with_mqa`` counts as one matrix, as DeepSeek publishes it.

torch.optim.Muon does the same for matrices alone. Here one optimizer has both kinds of
groups, so schedules, clipping and checkpoints handle one object. Stacks of experts are
supported too.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

# Jordan's coefficients of the Newton-Schulz iteration; singular values end within 0.7..1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
OUTER = ("embed", "lm_head", "wte", "wpe", "embeddings")  # in names of embeddings and heads
FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|gate_up|experts\.(base_layer\.)*lora_")


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Returns True if a weight is a matrix (or a stack) between embeddings and head."""
    bias = name.rsplit(".", 1)[-1].endswith("bias")
    return parameter.ndim in (2, 3) and not bias and not any(word in name for word in OUTER)


def rows_of_matrices(name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...] | None:
    """Returns the rows of each matrix in a hidden weight; () for one matrix, None if unknown.

    Args:
        shapes: shapes by name of all weights, which include the layer's other weights.
    """
    *_, rows, width = shapes[name]
    layer, _, projection = name.removesuffix(".weight").rpartition(".")

    def other(projection: str) -> Sequence[int]:
        suffix = ".weight" if name.endswith(".weight") else ""
        return shapes.get(f"{layer}.{projection}{suffix}", (0, 0))

    if projection == "gate_up_proj" and tuple(other("down_proj")[-2:]) == (width, rows // 2):
        return rows // 2, rows // 2
    if projection == "qkv_proj" and 0 < (queries := other("o_proj")[-1]) < rows:
        keys, odd = divmod(rows - queries, 2)
        return None if odd or queries % keys else (queries, keys, keys)
    if projection == "in_proj_weight" and rows == 3 * width:  # torch's MultiheadAttention
        return width, width, width
    if projection == "o_a_proj" and (groups := other("q_b_proj")[0] // width):  # heads in groups
        return (rows // groups,) * groups
    stacked = len(shapes[name]) == 3
    return None if FUSED.search(name) or (stacked and "experts" not in name) else ()


def orthogonalised(matrices: Tensor) -> Tensor:
    """Sets the singular values of the last two dimensions near 1, by five Newton-Schulz steps.

    The computation is in bf16 on a GPU, as by the authors, and in float32 on a processor.
    """
    a, b, c = COEFFICIENTS
    iterate = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    tall = iterate.shape[-2] > iterate.shape[-1]
    if tall:  # uses the smaller product
        iterate = iterate.mT
    iterate = iterate / iterate.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = iterate @ iterate.mT
        iterate = a * iterate + (b * gram + c * gram @ gram) @ iterate
    return (iterate.mT if tall else iterate).to(matrices.dtype)


class MuonAdamW(Optimizer):
    """Optimizer: Muon updates groups with ``muon: True``, AdamW the others.

    Args:
        groups: parameter groups; a group without ``muon`` is AdamW's.
            ``rows`` of each matrix in one of its weights; without it, a weight is one matrix.
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
        # The groups get all of AdamW's keys, so that AdamW's step() can update them.
        plain = AdamW([{**g, "params": list(g["params"])} for g in groups], **defaults)
        super().__init__(plain.param_groups, {**plain.defaults, "muon": False, "rows": ()})
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
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update_matrices(parameter, group)
        # Groups and state may have been replaced (loading, master weights).
        self._plain.param_groups = [g for g in self.param_groups if not g["muon"]]
        self._plain.state = self.state
        if self._plain.param_groups:
            self._plain.step()
        return loss

    def _update_matrices(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        grad, moment = parameter.grad, state["momentum"]
        assert grad is not None
        moment.lerp_(grad, 1 - self.momentum)
        direction = grad.lerp(moment, self.momentum)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        rows = list(group["rows"]) or parameter.shape[-2]
        for matrix, part in zip(parameter.split(rows, -2), direction.split(rows, -2), strict=True):
            size = 0.2 * math.sqrt(max(matrix.shape[-2:]))
            matrix.add_(orthogonalised(part), alpha=-group["lr"] * size)


def muon_groups(
    groups: Iterable[dict[str, Any]], named: Iterable[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """Splits each group by the update rule of its weights: Muon, with its matrices, or AdamW.

    A warning names the first fused weight of unknown form.
    """
    weights = dict(named)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    hidden = [name for name, weight in weights.items() if is_hidden_matrix(name, weight)]
    forms = {id(weights[name]): rows_of_matrices(name, shapes) for name in hidden}
    if unknown := [name for name in hidden if forms[id(weights[name])] is None]:
        warnings.warn(
            f"muon: {unknown[0]} holds several matrices in an unknown form ({len(unknown)} such "
            "weights); AdamW moves them",
            stacklevel=2,
        )
    new_groups = []
    for group in groups:
        members: dict[tuple[int, ...] | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            members.setdefault(forms.get(id(parameter)), []).append(parameter)
        for rows in sorted(members, key=lambda rows: (rows is None, rows or ())):
            muon = {"muon": rows is not None, "rows": rows or ()}
            new_groups.append({**group, "params": members[rows], **muon})
    return new_groups
