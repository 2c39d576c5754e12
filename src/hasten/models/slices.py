"""Values of a model's weights, in parts: where transformers would take each number from.

A trained weight comes from tensors of the files by transformers' own mapping. It renames
tensors, stacks the experts of a layer, joins gate and up projection, and cuts fused
tensors. A new weight is drawn by the model's own rule (``_init_weights``) from a seed that
depends on its name. So any rank can get any part of any weight without the others.

What these rules don't describe is refused (`UnknownSourceError`). Then the whole model is loaded.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hasten.models.weights import StoredWeights
from hasten.parts.nn.late_weights import LateWeight, read_later

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SAMPLES = 1000  # numbers of a new weight that show if the model's rule has set it


class UnknownSourceError(Exception):
    """How a weight is made isn't known well enough to make a part of it; one sentence."""


class WeightSource(Protocol):
    """The values of a weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        """Writes the part that begins at ``start`` into ``part``, in its format."""


# Trained weights


@dataclass(frozen=True)
class Stacked:
    """Tensors along a new first dimension: the experts of a layer."""

    parts: tuple[WeightSource, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        for index, row in enumerate(part):
            self.parts[start[0] + index].copy(start[1:], row)


@dataclass(frozen=True)
class Joined:
    """Tensors one after the other along a dimension."""

    parts: tuple[WeightSource, ...]
    dimension: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = list(self.parts[0].shape)
        first[self.dimension] = sum(part.shape[self.dimension] for part in self.parts)
        return tuple(first)

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        axis, offset = self.dimension, 0
        begin, end = start[axis], start[axis] + part.shape[axis]
        for source in self.parts:
            low, high = max(begin, offset), min(end, offset + source.shape[axis])
            if low < high:
                inner = [*start]
                inner[axis] = low - offset
                source.copy(inner, part.narrow(axis, low - begin, high - low))
            offset += source.shape[axis]


@dataclass(frozen=True)
class Cut:
    """A part of a tensor along a dimension."""

    source: WeightSource
    dimension: int
    first: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.source.shape)
        shape[self.dimension] = self.length
        return tuple(shape)

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        inner = [*start]
        inner[self.dimension] += self.first
        self.source.copy(inner, part)


Collected = dict[str, list[WeightSource]]  # by pattern, as transformers collects tensors


def stored_sources(model: PreTrainedModel, stored: StoredWeights) -> dict[str, WeightSource]:
    """Returns the source of each tensor of the model's state, as transformers converts the files.

    Raises:
        UnknownSourceError: a conversion that isn't known here, or tensors that don't fit.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict(keep_vars=True)
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    sources: dict[str, WeightSource] = {}
    collected: dict[str, tuple[Any, Collected]] = {}
    for name in sorted(stored.tensors, key=dot_natural_key):
        prefix = model.base_model_prefix
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed not in state:
            if any(p.search(renamed) for p in ignored):
                continue
            raise UnknownSourceError(f"the model has no place for {name}")
        if pattern is None:
            sources[renamed] = stored.tensors[name]
        else:
            _, tensors = collected.setdefault(renamed, (by_pattern[pattern], {}))
            tensors.setdefault(pattern, []).append(stored.tensors[name])
    for name, (converter, tensors) in collected.items():
        sources |= _converted(name, converter, tensors)
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    _share(state, sources)
    return sources


def _converted(name: str, converter: Any, collected: Collected) -> dict[str, WeightSource]:
    """Returns the sources of the weights that a conversion makes; ``name`` is the first of them."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

    targets = converter.target_patterns
    for step in converter.operations:
        if type(step) is MergeModulelist and step.dim == 0:
            single = targets[0] if len(collected) == len(targets) == 1 else None
            collected = {single or k: [_stacked(name, v)] for k, v in collected.items()}
        elif type(step) is Concatenate and step.num_shards_attribute is None and len(targets) == 1:
            patterns = [p for p in converter.source_patterns if p in collected]
            parts = tuple(part for p in patterns for part in collected[p])
            collected = {targets[0]: [Joined(parts, step.dim % len(parts[0].shape))]}
        elif type(step) is Chunk and step.num_shards_attribute is None and len(collected) == 1:
            ((source, *_),) = collected.values()
            axis = step.dim % len(source.shape)
            length, remainder = divmod(source.shape[axis], len(targets))
            if remainder:
                raise UnknownSourceError(f"{name} is cut into unequal parts")
            collected = {
                target: [Cut(source, axis, index * length, length)]
                for index, target in enumerate(targets)
            }
        else:
            raise UnknownSourceError(f"{name} is made by {step!r}")
    key = next((k for k in collected if k in name), None)
    if key is None or any(len(parts) != 1 for parts in collected.values()):
        raise UnknownSourceError(f"{name} is made of tensors that no step joins")
    prefix, _, suffix = name.partition(key)
    return {f"{prefix}{target}{suffix}": parts[0] for target, parts in collected.items()}


def _stacked(name: str, parts: Sequence[WeightSource]) -> Stacked:
    if len({tuple(part.shape) for part in parts}) > 1:
        raise UnknownSourceError(f"the experts of {name} differ in shape")
    return Stacked(tuple(parts))


def _share(state: Mapping[str, Tensor], sources: dict[str, WeightSource]) -> None:
    """Gives tied tensors one source, and compares all with the model's state."""
    first: dict[int, WeightSource] = {}
    for name, tensor in state.items():
        if name in sources:
            first.setdefault(id(tensor), sources[name])
    for name, tensor in state.items():
        source = first.get(id(tensor))
        if source is None or tuple(source.shape) != tuple(tensor.shape):
            stored = "missing" if source is None else f"{list(source.shape)} in the files"
            raise UnknownSourceError(f"{name} {list(tensor.shape)} is {stored}")
        sources[name] = source


# New weights


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
            raise UnknownSourceError(f"{self.name} has no rule for new values")
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


def drawn_sources(model: PreTrainedModel, seed: int) -> dict[str, Drawn]:
    """Returns a source for each parameter and buffer of a model, tied ones under each name."""
    return dict(_drawn(_without_memory(model), seed, "", (), ()))


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


# The model


def expect_weights(model: PreTrainedModel, seed: int, stored: StoredWeights | None) -> None:
    """Gives a skeleton's buffers their values and its parameters their sources.

    Args:
        model: on the meta device, its parameters in the format in which they are held.
        seed: of new weights.
        stored: trained weights; None: all are new.

    Raises:
        UnknownSourceError: transformers makes a tensor in a way that isn't known here.
    """
    drawn = drawn_sources(model, seed)
    sources = {} if stored is None else stored_sources(model, stored)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if name in sources:
                values = torch.empty(buffer.shape, dtype=buffer.dtype)
                sources[name].copy([0] * buffer.ndim, values)
            else:
                values = drawn[name].values()
            module._buffers[key] = values
    weights = {}
    for name, parameter in model.named_parameters():
        shape, dtype = tuple(parameter.shape), parameter.dtype
        weights[name] = (
            LateWeight(name, shape, dtype, full=drawn[name].values)
            if stored is None
            else LateWeight(name, shape, dtype, sources[name].copy)
        )
    read_later(model, weights)
