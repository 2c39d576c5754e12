"""A tensor as other ranks would read it: compress and decompress on one rank, with error feedback.

A loop that compresses each gradient by hand and then averages gives tensors no name. They are told
apart by the order of calls between two averages, which must then stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hasten.parts.comm.error_feedback import Memory, Piece
from hasten.parts.comm.settings import Settings


class Locally:
    """What ``compress`` remembers; ``calls`` counts them since the last average."""

    def __init__(self, settings: Settings) -> None:
        self.calls = 0
        self._way = settings.way(settings.momentum)
        self._memory = Memory()
        self._shapes: list[tuple[int, ...]] = []  # of unnamed tensors, in their order
        self._unnamed = 0
        self._complete = False  # a whole round of calls was seen

    @torch.no_grad()
    def compress(self, tensor: Tensor, name: str | None) -> Tensor:
        """What the others would read; the tensor itself if a number in it isn't finite."""
        if name is None:
            name = self._place(tuple(tensor.shape))
        self.calls += 1
        pieces = (Piece(name, tuple(tensor.shape)),)
        if self._memory.has_left(pieces):  # the same name again, without an average between
            self._memory.settle(True)
            self._way.settle(True)
        flat = tensor.detach().flatten().float()
        kept = self._memory.kept(pieces, flat.device) if self._way.feedback else None
        decoded, left = self._way.local(flat, kept, pieces)
        if decoded is None:
            return tensor
        if left is not None:
            self._memory.leave(pieces, left)
        return decoded.view(tensor.shape).to(tensor.dtype)

    def settle(self, counted: bool) -> None:
        """Gradients have been averaged.

        Raises:
            ValueError: fewer tensors without a name were compressed than before.
        """
        if self._complete and self._unnamed != len(self._shapes):
            raise ValueError(
                f"{self._unnamed} tensors without a name were compressed since the last "
                f"synchronize_gradients and {len(self._shapes)} before it; give each a name"
            )
        self._complete = self._complete or bool(self._unnamed)
        self.calls = self._unnamed = 0
        self._memory.settle(counted)
        self._way.settle(counted)

    def state(self) -> dict[str, Any]:
        shapes = [list(shape) for shape in self._shapes] if self._complete else []
        return {
            "shapes": shapes,
            "residual": self._memory.state(),
            "way": self._way.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._shapes = [tuple(shape) for shape in state["shapes"]]
        self._complete, self.calls, self._unnamed = bool(self._shapes), 0, 0
        self._memory.load(state["residual"])
        self._way.load(state["way"])

    def _place(self, shape: tuple[int, ...]) -> str:
        place = self._unnamed
        if not self._complete and place == len(self._shapes):
            self._shapes.append(shape)
        before = self._shapes[place] if place < len(self._shapes) else None
        if before != shape:
            raise ValueError(
                f"tensor {place} since the last synchronize_gradients has shape {shape} and had "
                f"{before or 'no place'} before; call compress in the same order, or give each "
                "tensor a name"
            )
        self._unnamed += 1
        return f"call {place}"
