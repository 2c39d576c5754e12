"""Sums over ranks, which layouts of several ranks share, and the check for several ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hasten.core.context import JobContext
from hasten.core.layout import Layout
from hasten.machine.environment import World
from hasten.parts.comm.groups import sum_over_ranks


class RanksLayout(Layout):
    """A layout of all ranks of the process group.

    Args:
        partners: ranks that process the same examples, each with its part of the model.
    """

    partners = 1

    def __init__(self, world: World) -> None:
        """Every rank has its own examples."""
        self.size = self.data_size = self.averages = world.size
        self.data_rank = world.rank

    def all_reduce_data(self, values: Tensor) -> Tensor:
        return self.all_reduce_world(values) / self.partners

    def all_reduce_world(self, values: Tensor) -> Tensor:
        return sum_over_ranks(values)


def no_torch_distributed(context: JobContext) -> tuple[str, ...]:
    """Returns why several ranks can't work together at all; empty if they can, or on one rank."""
    if context.world.size > 1 and not dist.is_available():
        return ("this torch was built without torch.distributed",)
    return ()
