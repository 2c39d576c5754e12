"""Parameter groups as they should be: weight decay on matrices, none on norms and biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decayed_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimizer: tensors of two or more dimensions decay, the others don't."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        (matrices if parameter.ndim >= 2 else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
