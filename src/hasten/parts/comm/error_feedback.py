"""What messages left out, by parameter: remembered in float32 and added to the next gradient.

Error feedback (Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et
al., arXiv:1901.09847). DDP lays parameters out in buckets, and anew after the first step, so memory
belongs to a parameter's name; while the buckets stay as they are it lies as they do, without a
copy. What a step leaves counts only once the step does: a step that was skipped because a gradient
somewhere wasn't finite sent nothing that was used, and memory stays what it was before it. That
takes two tensors for as long as a step lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """A parameter in a bucket."""

    name: str
    shape: tuple[int, ...]
    width: int = 4  # bytes of a number of its gradient

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


Pieces = tuple[Piece, ...]  # in the order in which they lie in a bucket, end to end


def numbers(pieces: Pieces) -> int:
    """Of all pieces together."""
    return sum(piece.numbers for piece in pieces)


def parts_of(flat: Tensor, pieces: Pieces) -> list[Tensor]:
    """The bucket's parameters as flat views, in their order."""
    return list(flat[: numbers(pieces)].split([piece.numbers for piece in pieces]))


class Memory:
    """One float32 number for each of a parameter's, from step to step."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}
        self._flat: dict[Pieces, Tensor] = {}  # the same memory as buckets lie now
        self._left: dict[Pieces, Tensor] = {}  # by the step under way

    def kept(self, pieces: Pieces, device: torch.device) -> Tensor:
        """The bucket's memory as of the last step that counted; zeros at first. Not to be changed.

        Raises:
            ValueError: what is remembered of a parameter has another size.
        """
        if pieces not in self._flat:
            found = [self._of(piece, device) for piece in pieces]
            flat = torch.cat(found) if found else torch.zeros(0, device=device)
            self._adopt(pieces, flat)
        return self._flat[pieces]

    def leave(self, pieces: Pieces, values: Tensor) -> None:
        """What the step under way leaves out of this bucket; ``values`` becomes the memory's."""
        self._left[pieces] = values[: numbers(pieces)]

    def has_left(self, pieces: Pieces) -> bool:
        """Whether the step under way has left something of this bucket already."""
        return pieces in self._left

    def settle(self, counted: bool) -> None:
        """The step is over; if it didn't count, memory stays what it was before."""
        left, self._left = self._left, {}
        if counted:
            for pieces, values in left.items():
                self._adopt(pieces, values)

    def state(self) -> dict[str, Tensor]:
        """By parameter, as copies on the host."""
        return {name: v.detach().to("cpu", copy=True) for name, v in self._by_name.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """What ``state`` said, in the place of all that is remembered."""
        self._flat, self._left = {}, {}
        self._by_name = {name: v.detach().float().flatten().clone() for name, v in state.items()}

    def _of(self, piece: Piece, device: torch.device) -> Tensor:
        found = self._by_name.get(piece.name)
        if found is None:
            return torch.zeros(piece.numbers, device=device)
        if found.numel() != piece.numbers:
            raise ValueError(
                f"error feedback remembers {found.numel()} numbers of {piece.name} and it has "
                f"{piece.numbers}: the memory is of another model"
            )
        return found.to(device)

    def _adopt(self, pieces: Pieces, flat: Tensor) -> None:
        if pieces not in self._flat:  # other buckets that held these parameters are no more
            names = {piece.name for piece in pieces}
            self._flat = {
                other: values
                for other, values in self._flat.items()
                if names.isdisjoint(piece.name for piece in other)
            }
        self._flat[pieces] = flat
        for piece, values in zip(pieces, parts_of(flat, pieces), strict=True):
            self._by_name[piece.name] = values
