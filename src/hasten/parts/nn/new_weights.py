"""New weights, each drawn by its model's own rule (``_init_weights``) from a seed of its own.

The seed depends on the weight's name. So any rank can draw any weight without the others, and the
weights are the same in every layout.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hasten.parts.nn.late_weights import LateWeight, read_later

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLES = 1000  # numbers of a new weight that show if the model's rule has set it


class UnknownSourceError(ValueError):
    """How a weight is made isn't known well enough to make a part of it; one sentence."""


@dataclass(frozen=True)
class Drawn:
    """A new weight or buffer, drawn by its model's own rule.

    Args:
        path: the module that holds it and those around it, from the inside, each with the rule of
            its model. Transformers runs all these rules in this order.
        steps: names of the modules on the path, from the inside.
    """

    path: tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...]
    steps: tuple[str, ...]
    key: str
    name: str
    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @torch.no_grad()
    def values(self) -> Tensor:
        """Draws the whole tensor.

        Raises:
            UnknownSourceError: the rule leaves it as it is.
        """
        unset = math.nan if self.dtype.is_floating_point else torch.iinfo(self.dtype).min
        values = torch.empty(self.shape, dtype=self.dtype)
        samples = values.view(-1)[:: max(1, values.numel() // SAMPLES)]
        samples.fill_(unset)
        with seeded_by_name(self.seed, self.name):
            inner = _with_one(self.path[0][0], self.key, values)
            self.path[0][1](inner)
            for (module, rule), step in zip(self.path[1:], self.steps, strict=True):
                outer = _with_one(module, "", values)
                outer._modules = {**module._modules, step: inner}
                rule(outer)
                inner = outer
        untouched = samples.isnan() if self.dtype.is_floating_point else samples == unset
        if bool(untouched.any()):
            raise UnknownSourceError(
                f"{self.name} has no rule for new values; take ddp as the layout"
            )
        return values


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the CPU's random numbers inside; restores the former state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the accelerators, which nothing restores.
        torch.default_generator.manual_seed(seed)
        yield


def seeded_by_name(seed: int, name: str) -> AbstractContextManager[None]:
    """Seeds the CPU's random numbers inside, from a run's seed and a weight's name."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return seeded(int.from_bytes(digest) >> 1)


def _with_one(module: nn.Module, key: str, values: Tensor) -> nn.Module:
    """Returns a view of a module without memory in which one tensor has values."""
    view = copy.copy(module)
    view._parameters, view._buffers = {**module._parameters}, {**module._buffers}
    if key in view._buffers:
        view._buffers[key] = values
    elif key:
        view._parameters[key] = nn.Parameter(values, requires_grad=False)
    return view


def _without_memory(module: nn.Module) -> nn.Module:
    """Returns a view of a module that no later change of the module reaches."""
    view = copy.copy(module)
    view._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"), False)
        for name, p in module._parameters.items()
    }
    view._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta")
        for name, b in module._buffers.items()
    }
    view._modules = {
        name: None if child is None else _without_memory(child)
        for name, child in module._modules.items()
    }
    return view


def expect_weights(
    model: PreTrainedModel,
    seed: int,
    stored: Mapping[str, Callable[[Sequence[int], Tensor], None]],
    prefix: str = "",
) -> None:
    """Gives a skeleton's buffers their values, and its parameters the way to read them.

    Args:
        model: on the meta device, its parameters in the format in which they are held.
        seed: of new weights.
        stored: ``LateWeight.copy`` of each trained weight, by name; the others are new.
        prefix: of the model's names, from which new weights are seeded.

    Raises:
        UnknownSourceError: the model draws a tensor in a way that isn't known here.
    """
    drawn = dict(_drawn(_without_memory(model), seed, prefix, (), ()))
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{path}.{key}" if path else key
            if name in stored:
                values = torch.empty(buffer.shape, dtype=buffer.dtype)
                stored[name]([0] * buffer.ndim, values)
            else:
                values = drawn[prefix + name].values()
            module._buffers[key] = values
    weights = {}
    for name, parameter in model.named_parameters():
        shape, dtype = tuple(parameter.shape), parameter.dtype
        weights[name] = (
            LateWeight(name, shape, dtype, stored[name])
            if name in stored
            else LateWeight(name, shape, dtype, full=drawn[prefix + name].values)
        )
    read_later(model, weights)


def _drawn(
    module: nn.Module,
    seed: int,
    prefix: str,
    outer: tuple[tuple[nn.Module, Callable[[nn.Module], None]], ...],
    steps: tuple[str, ...],
) -> Iterator[tuple[str, Drawn]]:
    from transformers import PreTrainedModel

    rule = module._init_weights if isinstance(module, PreTrainedModel) else outer[0][1]
    path = ((module, rule), *outer)
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None:
                name, shape = prefix + key, tuple(tensor.shape)
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                yield name, Drawn(path, steps, key, name, seed, shape, dtype)
    for step, child in module.named_children():
        yield from _drawn(child, seed, f"{prefix}{step}.", path, (step, *steps))
