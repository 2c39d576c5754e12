"""Values of a model's weights, in parts: where transformers would take each number from.

A trained weight comes from tensors of the files by transformers' own mapping. It renames
tensors, stacks the experts of a layer, joins gate and up projection, and cuts fused
tensors. So any rank can get any part of any weight without the others.

What these rules don't describe is refused (`UnknownSourceError`). Then the whole model is loaded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hasten.models.weights import StoredWeights
from hasten.parts.nn.new_weights import UnknownSourceError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightSource(Protocol):
    """The values of a weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        """Writes the part that begins at ``start`` into ``part``, in its format."""


@dataclass(frozen=True)
class Assembled:
    """A weight of several tensors.

    Args:
        parts: each tensor, and where it begins in the weight. What is outside of the weight is
            cut off. A tensor with fewer dimensions is one row of the first ones.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[WeightSource, tuple[int, ...]], ...]

    def copy(self, start: Sequence[int], part: Tensor) -> None:
        for source, offset in self.parts:
            rows = len(offset) - len(source.shape)
            ends = map(sum, zip(offset, (*[1] * rows, *source.shape), strict=True))
            low = [max(pair) for pair in zip(start, offset, strict=True)]
            high = [min(e, s + n) for e, s, n in zip(ends, start, part.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                box = [slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True)]
                begin = [a - o for a, o in zip(low, offset, strict=True)]
                source.copy(begin[rows:], part[tuple(box)][(0,) * rows])


def _along(axis: int, position: int, dimensions: int) -> tuple[int, ...]:
    return tuple(position if n == axis else 0 for n in range(dimensions))


def _joined(parts: Sequence[WeightSource], axis: int) -> Assembled:
    """Returns tensors one after the other along a dimension."""
    shape = list(parts[0].shape)
    *starts, shape[axis] = itertools.accumulate((p.shape[axis] for p in parts), initial=0)
    offsets = [_along(axis, start, len(shape)) for start in starts]
    return Assembled(tuple(shape), tuple(zip(parts, offsets, strict=True)))


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
            parts = [part for p in patterns for part in collected[p]]
            collected = {targets[0]: [_joined(parts, step.dim % len(parts[0].shape))]}
        elif type(step) is Chunk and step.num_shards_attribute is None and len(collected) == 1:
            ((source, *_),) = collected.values()
            shape, axis = list(source.shape), step.dim % len(source.shape)
            shape[axis], remainder = divmod(shape[axis], len(targets))
            if remainder:
                raise UnknownSourceError(f"{name} is cut into unequal parts")
            starts = [
                _along(axis, -index * shape[axis], len(shape)) for index in range(len(targets))
            ]
            cuts = [Assembled(tuple(shape), ((source, start),)) for start in starts]
            collected = {target: [cut] for target, cut in zip(targets, cuts, strict=True)}
        else:
            raise UnknownSourceError(f"{name} is made by {step!r}")
    key = next((k for k in collected if k in name), None)
    if key is None or any(len(parts) != 1 for parts in collected.values()):
        raise UnknownSourceError(f"{name} is made of tensors that no step joins")
    prefix, _, suffix = name.partition(key)
    return {f"{prefix}{target}{suffix}": parts[0] for target, parts in collected.items()}


def _stacked(name: str, parts: Sequence[WeightSource]) -> Assembled:
    """Returns tensors along a new first dimension: the experts of a layer."""
    shape = parts[0].shape
    if len({tuple(part.shape) for part in parts}) > 1:
        raise UnknownSourceError(f"the experts of {name} differ in shape")
    rows = [(part, _along(0, index, 1 + len(shape))) for index, part in enumerate(parts)]
    return Assembled((len(parts), *shape), tuple(rows))


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
