"""Shards that are contiguous in the flattened tensor, as DeepSpeed gives them to ranks.

The chunk of such a shard has one dimension, whatever the tensor has. A checkpoint of flat chunks
can be read by a layout with rectangular ones, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Size = tuple[int, ...]


class FlatShard(Tensor):
    """A rank's flat shard of a tensor: like a DTensor it has the shape of the full tensor.

    Args:
        local: elements of the shard, one dimension.
        shape: of the full tensor.
        start: number of the first element in the full tensor.
    """

    local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, shape: Size, start: int) -> FlatShard:
        made: FlatShard = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        return made

    def __init__(self, local: Tensor, shape: Size, start: int) -> None:
        self.local, self.start = local, start

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a FlatShard; use its attribute local")


Read = Callable[[Size, Size], Tensor]  # offset, sizes -> values


def flat_from_boxes(read: Read, shape: Size, start: int, count: int) -> Tensor:
    """Returns ``count`` elements from ``start``; ``read`` returns any rectangular part."""
    if not shape:
        return read((), ()).reshape(1)[start : start + count]
    row = math.prod(shape[1:])
    first = start // row if row else 0
    last = -(-(start + count) // row) if row else 0
    rows = read((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    return rows.reshape(-1)[start - first * row :][:count]


def box_from_flat(read: Read, shape: Size, offset: Size, sizes: Size) -> Tensor:
    """Returns a rectangular part; ``read`` returns any contiguous elements."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if not math.prod(sizes):
        return read((0,), (0,)).reshape(sizes)
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    count = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return read((start,), (count,)).as_strided(sizes, strides).contiguous()
