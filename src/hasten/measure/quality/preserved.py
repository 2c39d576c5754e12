"""State that a check of the first step restores: random state, buffers, dropout, plain values."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def nothing_else_changes(model: nn.Module, *host_objects: Any) -> Iterator[None]:
    """Random state, buffers, dropout and the plain values of modules and ``host_objects`` come
    back. So do those of a host object's own modules and counters, such as metrics.
    """
    states = random.getstate(), np.random.get_state()
    accelerators = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    roots = [model, *host_objects, *itertools.chain(*map(_counting, host_objects))]
    inside = [tuple(root.modules()) if isinstance(root, nn.Module) else (root,) for root in roots]
    holders = {id(one): one for one in itertools.chain(*inside)}.values()
    # Copies of the numbers, texts, tensors, and small containers of such, that each holds.
    saved = [
        (vars(h), set(vars(h)), {n: copy.deepcopy(vars(h)[n]) for n in _plain_names(vars(h))})
        for h in holders
    ]
    every = itertools.chain(*(h._buffers.values() for h in holders if isinstance(h, nn.Module)))
    buffers = [(b, b.detach().clone()) for b in every if b is not None]
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng(accelerators), without_dropout(model):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        np.random.set_state(states[1])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for holder, names, values in saved:
            _restore(holder, values)
            for name in _plain_names(holder) - names:  # of what the passes counted first
                del holder[name]


def _counting(host_object: Any) -> list[Any]:
    """The modules that an object holds, and its objects of classes from the same package."""
    package = type(host_object).__module__.partition(".")[0]
    return [
        value
        for value in vars(host_object).values()
        if isinstance(value, nn.Module)
        or (hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] == package)
    ]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


_LARGEST = 20_000  # elements of a container that is copied
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_REGISTRIES = {"_parameters", "_buffers", "_modules"}


def _plain_names(holder: Mapping[str, Any]) -> set[str]:
    # Hooks that a library registers at the first pass stay, as does its mark that it did.
    return {
        key
        for key, value in holder.items()
        if key not in _REGISTRIES and "hook" not in key and _count(value, _LARGEST) >= 0
    }


def _count(value: Any, room: int) -> int:
    """The rest of ``room`` after the elements of a plain value; negative: can't be copied."""
    if isinstance(value, _SCALARS):
        return room - 1
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and value.is_leaf and not value.requires_grad
        return room - value.numel() if is_plain else -1
    if isinstance(value, dict):
        parts: Any = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | deque):
        parts = value
    else:
        return -1
    if len(parts) > room:
        return -1
    for part in parts:
        room = _count(part, room)
        if room < 0:
            return -1
    return room


def _restore(holder: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        now = holder.get(key)
        if isinstance(value, dict) and isinstance(now, dict):
            now.clear()
            now.update(value)
        elif isinstance(value, list) and isinstance(now, list):
            now[:] = value
        elif isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
            with torch.no_grad():
                now.copy_(value)
        else:
            holder[key] = value


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, the rates of dropout in the model's modules and configs are 0."""
    changed: list[tuple[dict[str, Any], str, float]] = []
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    drops = [vars(m) for m in model.modules()] + [
        vars(c) for c in configs.values() if hasattr(c, "__dict__")
    ]
    for holder, module in zip(drops, [*model.modules(), *configs], strict=False):
        for key, value in holder.items():
            is_rate = "drop" in key or (key == "p" and "drop" in type(module).__name__.lower())
            if is_rate and isinstance(value, float) and value > 0:
                changed.append((holder, key, value))
    for holder, key, _ in changed:
        holder[key] = 0.0
    try:
        yield
    finally:
        for holder, key, value in changed:
            holder[key] = value
