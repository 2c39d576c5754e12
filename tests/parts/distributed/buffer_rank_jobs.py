"""What two ranks have in buffers before and after a step of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.distributed.ddp import leave_constants
from hasten.parts.nn.quantised import QuantisedLinear


class Model(nn.Module):
    """A table that isn't part of the state, a frozen base, an adapter and, if ``norm``, sums."""

    table: Tensor

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.base = QuantisedLinear(nn.Linear(4, 4), "int8")
        self.adapter = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.norm(self.adapter(values) + self.base(values)) * self.table
        return out


def held(world: World) -> dict[str, Any]:
    return {str(norm): _buffers_of(Model(norm), world.rank) for norm in (False, True)}


def _buffers_of(model: Model, rank: int) -> dict[str, Any]:
    """Codes and tables once they are wrapped and once a rank has changed its own and stepped."""
    with torch.no_grad():
        model.base.codes += rank
        model.table += rank
    wrapped = DistributedDataParallel(model)
    leave_constants(wrapped)
    alike = [model.base.codes.tolist(), model.table.tolist()]
    model.table += rank
    wrapped(torch.full((2, 4), float(rank))).sum().backward()
    return {"made": alike, "table": model.table.tolist()}
