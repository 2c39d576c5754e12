"""State that a check of the first step restores: random state, buffers, dropout, plain values.

The check runs library code alone: a model, or the loss of a library's trainer. Hooks that the
user's own code has registered on the model aren't called in it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LIBRARIES = ("transformers", "torch", "peft", "accelerate", "hasten")
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
_TRAINERS = ("trl", "lightning", "pytorch_lightning")


def module_of(function: Any) -> str:
    """Returns the name of the module that has the code of a function, method or hook."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    # A decorator that wraps another function has that one's __module__, and its own globals.
    module = getattr(function, "__globals__", {}).get("__name__")
    return str(module or getattr(function, "__module__", None) or type(function).__module__)


def library_of(function: Any) -> str:
    """Returns the name of the package that has the code of a function, method or hook."""
    return module_of(function).partition(".")[0]


@contextlib.contextmanager
def nothing_else_changes(model: nn.Module, *host_objects: Any) -> Iterator[None]:
    """Restores random state, buffers, and plain values of modules and ``host_objects``.

    Values are numbers, texts, tensors, containers of such, and generators of random numbers.
    A host object's own modules and counters, such as metrics, are restored too. Inside,
    hooks of the user's own code are off.
    """
    states = random.getstate(), np.random.get_state()
    accelerators = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    host_roots = [*host_objects, *itertools.chain(*map(_counting, host_objects))]
    inside = [
        tuple(root.modules()) if isinstance(root, nn.Module) else (root,) for root in host_roots
    ]
    rooms = {id(one): (one, _LARGEST) for one in itertools.chain(*inside)}
    rooms |= {id(one): (one, sys.maxsize) for one in model.modules()}
    saved = [_Saved(vars(holder), room) for holder, room in rooms.values()]
    modules = [holder for holder, _ in rooms.values() if isinstance(holder, nn.Module)]
    every = itertools.chain(*(m._buffers.values() for m in modules))
    buffers = [(b, b.detach().clone()) for b in every if b is not None]
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.random.fork_rng(accelerators), _without_foreign_hooks(model):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        random.setstate(states[0])
        np.random.set_state(states[1])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for holder in saved:
            holder.restore()


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


_LARGEST = 20_000  # elements of a container of a host object that is copied
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_REGISTRIES = {"_parameters", "_buffers", "_modules"}


class _Saved:
    """Copies of the plain values of one object, and the states of its generators."""

    def __init__(self, holder: dict[str, Any], room: int) -> None:
        self._holder, self._room, self._names = holder, room, set(holder)
        self._values = {n: copy.deepcopy(holder[n]) for n in _plain_names(holder, room)}
        self._draws = [(v, _draw_state(v)) for v in holder.values() if isinstance(v, _GENERATORS)]

    def restore(self) -> None:
        for key, value in self._values.items():
            now = self._holder.get(key)
            if isinstance(value, dict) and isinstance(now, dict):
                now.clear()
                now.update(value)
            elif isinstance(value, list) and isinstance(now, list):
                now[:] = value
            elif isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape:
                with torch.no_grad():
                    now.copy_(value)
            else:
                self._holder[key] = value
        for name in _plain_names(self._holder, self._room) - self._names:  # counted first inside
            del self._holder[name]
        for generator, state in self._draws:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _draw_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _plain_names(holder: Mapping[str, Any], room: int) -> set[str]:
    # Hooks that a library registers at the first pass stay, as does its mark that it did.
    return {
        key
        for key, value in holder.items()
        if key not in _REGISTRIES and "hook" not in key and _count(value, room) >= 0
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


@contextlib.contextmanager
def _without_foreign_hooks(model: nn.Module) -> Iterator[None]:
    removed: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = []
    for module in model.modules():
        for hooks in (getattr(module, name) for name in HOOKS):
            foreign = [k for k, h in hooks.items() if library_of(h) not in (*LIBRARIES, *_TRAINERS)]
            if foreign:
                removed.append((hooks, dict(hooks)))
                for key in foreign:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[bool]:
    """Inside, the rates of dropout in the model's modules and configs are 0.

    It yields False if they were 0 before.
    """
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
        yield bool(changed)
    finally:
        for holder, key, value in changed:
            holder[key] = value
