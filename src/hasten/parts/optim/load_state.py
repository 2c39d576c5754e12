"""Loads an optimizer's state with the bits and formats that were saved.

torch's ``load_state_dict`` casts all state but ``step`` to the format of the weight. Many
optimizers keep float32 state with bf16 weights: factors, masters, products of momenta, counts.
A resumed run would continue with rounded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state as its ``load_state_dict`` does, without any rounding."""
    optimizer.load_state_dict(state)
    put_formats_back(optimizer, state)


def put_formats_back(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Replaces tensors that were cast when ``state`` was loaded by the saved tensors."""
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, weight in zip(numbers, weights, strict=True):
        saved = state["state"].get(number, {})
        loaded = optimizer.state.get(weight, {})
        for key in saved.keys() & loaded.keys() - {"step"}:  # torch doesn't cast the step
            loaded[key] = _as_saved(saved[key], loaded[key], weight.device)


def _as_saved(saved: Any, loaded: Any, device: torch.device) -> Any:
    if isinstance(saved, Tensor):
        same = isinstance(loaded, Tensor) and loaded.dtype == saved.dtype
        return loaded if same else saved.to(device, copy=True)
    if isinstance(saved, dict):
        return {key: _as_saved(value, loaded[key], device) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(_as_saved(value, other, device) for value, other in pairs)
    return loaded if isinstance(loaded, Tensor) else saved  # torch may turn a string into a list
