"""Weights that are read later: meta parameters, each with a way to read any part of itself.

A model built this way takes no memory. Techniques replace its modules and layouts split its
parameters first. Each rank then reads only the parts that it keeps. Buffers have values from
the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MARK = "late_weight"  # attribute of a parameter that is read later


@dataclass(frozen=True)
class LateWeight:
    """A weight that can be read in parts.

    Args:
        name: its name in the model.
        copy: writes a part into a tensor of its shape, in that tensor's format. The part begins
            at ``start``, an index per dimension. None: no part can be read alone.
        full: returns a new tensor of the whole weight, if there is no ``copy``.
        together: all ranks of a host read the whole weight, in the same order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copy: Callable[[Sequence[int], Tensor], None] | None = None
    full: Callable[[], Tensor] | None = None
    together: bool = False

    @torch.no_grad()
    def read(self, start: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """Returns the part of ``size`` that begins at ``start`` on the host; default: all of it."""
        start, size = start or [0] * len(self.shape), tuple(self.shape if size is None else size)
        if self.full is not None:
            part = box_of(self.full(), start, size).to(self.dtype)
            return part if size == self.shape else part.clone()
        assert self.copy is not None
        part = torch.empty(size, dtype=self.dtype)
        if part.numel():
            self.copy(start, part)
        return part


def box_of(full: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Returns a view of the part that begins at ``start``; an empty one may begin at the end."""
    for dimension, (first, length) in enumerate(zip(start, size, strict=True)):
        full = full.narrow(dimension, min(first, full.shape[dimension]), length)
    return full


def read_later(model: nn.Module, weights: Mapping[str, LateWeight]) -> None:
    """Marks the model's parameters with the weights of their names; tied ones are one weight."""
    for name, parameter in model.named_parameters():
        setattr(parameter, MARK, weights[name])


def late_weight(parameter: Tensor) -> LateWeight | None:
    """Returns how a parameter is read; None if it has its values."""
    weight: LateWeight | None = getattr(parameter, MARK, None)
    return weight


def values_of(weight: Tensor) -> Tensor:
    """Returns the values of a weight; a late one is read."""
    late = late_weight(weight)
    return weight.detach() if late is None else late.read()


def is_late(module: nn.Module) -> bool:
    """Returns True if parameters of the module are read later."""
    return any(late_weight(p) is not None for p in module.parameters())


def read_now(
    module: nn.Module, only: Callable[[nn.Parameter], bool] = lambda parameter: True
) -> Callable[[], None]:
    """Reads the late weights of a module; its parameters are new objects.

    Args:
        only: selects the parameters that are read.

    Returns:
        A function that puts the former parameters back, which have no memory.
    """
    read: dict[int, nn.Parameter] = {}
    former = []
    for table, name, parameter in _parameters(module):
        weight = late_weight(parameter)
        if weight is None or not only(parameter):
            continue
        if id(weight) not in read:
            read[id(weight)] = nn.Parameter(weight.read(), parameter.requires_grad)
        former.append((table, name, parameter))
        table[name] = read[id(weight)]

    def put_back() -> None:
        for table, name, parameter in former:
            table[name] = parameter

    return put_back


@contextmanager
def read_in_turn(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, late weights of a block have memory while it is called; others have it all the time.

    No gradient can be computed.
    """
    inner = {id(parameter) for block in blocks for parameter in block.parameters()}
    put_back = {module: read_now(module, lambda parameter: id(parameter) not in inner)}

    def before(block: nn.Module, inputs: object) -> None:
        put_back[block] = read_now(block)

    def after(block: nn.Module, inputs: object, output: object) -> None:
        put_back.pop(block)()

    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for former in put_back.values():
            former()


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """Inside, late weights are zeros on the host without memory, of their shapes and formats."""
    originals: dict[int, nn.Parameter] = {}
    by_original: dict[int, nn.Parameter] = {}
    for table, name, parameter in _parameters(module):
        if late_weight(parameter) is None:
            continue
        if id(parameter) not in by_original:
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            stand_in = nn.Parameter(zeros, parameter.requires_grad)
            setattr(stand_in, MARK, late_weight(parameter))
            by_original[id(parameter)], originals[id(stand_in)] = stand_in, parameter
        table[name] = by_original[id(parameter)]
    try:
        yield
    finally:
        for table, name, parameter in _parameters(module):
            if (original := originals.get(id(parameter))) is not None:
                table[name] = original.requires_grad_(parameter.requires_grad)


def _parameters(
    module: nn.Module,
) -> Iterator[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]:
    for part in list(module.modules()):
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                yield part._parameters, name, parameter
