"""Parameter groups as they should be: weight decay on matrices, none on norms and biases.

Embeddings and head are matrices and decay, as in nanoGPT, which decays every tensor of two or more
dimensions. Decaying a norm's scale or a bias pulls an output's size or offset towards 0, which
regularises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decayed_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices and stacks of them decay; vectors and biases don't.

    A stack of biases (one row per expert) has two dimensions and is known by its name.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        (matrices if decays else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
