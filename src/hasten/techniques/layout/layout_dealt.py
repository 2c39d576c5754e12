"""State of weights that are dealt out as DTensors: made whole, and dealt out again."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from hasten.errors import InputError
from hasten.parts.distributed import local_shards
from hasten.parts.distributed.local_shards import LocalShards


def whole_of(name: str, weights: LocalShards, weight: Tensor, value: Tensor, keeps: bool) -> Tensor:
    """What belongs to a weight, whole where ``keeps``; all ranks of its mesh call it.

    Raises:
        InputError: the value isn't laid out like its weight, under the layout of that name.
    """
    parameter = weights.parameter_of(weight)
    if not isinstance(parameter, DTensor) or not value.ndim:  # a number of steps
        return value
    try:
        return local_shards.whole_of(value, parameter, keeps)
    except ValueError as error:
        raise InputError(
            f"{name}: this optimizer keeps its state in another shape than weights have ({error}); "
            "leave checkpoints out, or take another optimizer"
        ) from error


def part_of(weights: LocalShards, weight: Tensor, whole: Tensor) -> Tensor:
    """This rank's piece of what belongs to a weight."""
    parameter = weights.parameter_of(weight)
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    part = local_shards.part_of(whole, parameter)
    return part if parameter is weight else part.to_local()
