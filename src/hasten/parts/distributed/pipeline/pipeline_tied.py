"""A head tied to the embedding, when the two are on different ranks: one weight in two places.

Both ends hold the whole matrix and each gets its own part of the gradient. After the backward
passes the parts are added on both, so that both take the same update and stay the same: a sum of
two numbers doesn't depend on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hasten.parts.distributed.pipeline.pipeline_stages import Cuttable, LanguageModel

MARK = "end_of_a_tied_head"  # the attribute of a weight whose other end is on another rank


class TiedHead:
    """The weight's copy on this rank, where the other is on another rank; else nothing."""

    def __init__(
        self, whole: Cuttable, homes: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        self.weight: Tensor | None = None
        self._before: Tensor | None = None
        self.counts = True  # whether this rank's copy belongs into a sum over all weights
        self._group, self._peer = group, -1
        if group is None or not isinstance(whole, LanguageModel) or not whole.tied:
            return
        ends, rank = (homes[0], homes[-1]), dist.get_rank(group)
        if ends[0] != ends[1] and rank in ends:
            self.weight = whole.causal.lm_head.weight
            setattr(self.weight, MARK, True)
            self._peer = ends[1] if rank == ends[0] else ends[0]
            self.counts = rank == ends[0]

    def begin(self) -> None:
        """A step begins: what earlier steps left is put aside, since it is a sum already."""
        if self.weight is not None:
            self._before, self.weight.grad = self.weight.grad, None

    def add(self, of: Tensor | None = None) -> None:
        """Add the other end's gradient to this one's; both ends call it.

        ``of`` is the tensor that carries the gradient, where it isn't the weight itself (a master).
        """
        held: Any = self.weight if of is None else of
        if self.weight is None or not held.requires_grad:
            return
        mine = held.grad if held.grad is not None else torch.zeros_like(held)
        mine, other = (
            mine.contiguous(),
            torch.empty_like(mine, memory_format=torch.contiguous_format),
        )
        ends: Any = {"group": self._group, "group_peer": self._peer}
        ops = [dist.P2POp(dist.isend, mine, **ends), dist.P2POp(dist.irecv, other, **ends)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        held.grad = mine + other if self._before is None else mine + other + self._before
        self._before = None


def is_end(weight: Tensor) -> bool:
    """Whether it is an end of a tied head, or a master that took the weight's marks over."""
    return hasattr(weight, MARK)
