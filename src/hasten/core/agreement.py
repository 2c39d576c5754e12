"""What ranks tell each other in a step beside gradients, and the default: everything, at once.

Where a wire lets ranks train apart from each other (local steps), a step that waited for such sums
would be as slow as the link. Then a step goes by what its own rank knows, times the number of
ranks, and ``settle`` makes weights and counts of all ranks equal again: before an evaluation,
before a checkpoint, at the end.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hasten.core.batch import Counts


class Sums(Protocol):
    """What adds up over ranks: a layout."""

    def sum(self, values: Tensor) -> Tensor: ...


@runtime_checkable
class Agreement(Protocol):
    """A wire that is one too takes the place of the default."""

    apart: bool  # ranks may differ in weights, optimizer state and progress until they settle

    def counts(self, mine: Counts, stop: bool) -> tuple[Counts, bool]:
        """Before a step's first pass: counts over all ranks, and whether the run stops here.

        The answer to the second is the same on every rank.
        """

    def sum(self, values: Tensor) -> Tensor:
        """A step's other sums over ranks: loss, gradients that aren't finite, load of experts."""

    def skipped(self) -> None:
        """A step was given up; ``after_update`` of the wire is not called for it."""

    def settle(self) -> None:
        """Every rank calls it between the same two steps; weights are equal after it."""

    def others(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """On rank 0 the same of each other rank, in order. For checkpoints; all ranks call it."""


class EachStep:
    """Every sum is taken when it is asked for, so that ranks never differ."""

    apart = False

    def __init__(self, layout: Sums) -> None:
        self._layout = layout

    def counts(self, mine: Counts, stop: bool) -> tuple[Counts, bool]:
        sums = self._layout.sum(torch.tensor([*astuple(mine), float(stop)], dtype=torch.float64))
        *found, wanted = sums.tolist()
        return Counts(*(round(v) for v in found)), bool(wanted)

    def sum(self, values: Tensor) -> Tensor:
        return self._layout.sum(values)

    def skipped(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def others(self, state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return []
