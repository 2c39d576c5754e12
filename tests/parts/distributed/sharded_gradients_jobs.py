"""Given gradients in a reduce-scatter with a codec in it, on several ranks; plain JSON values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.machine.environment import World
from hasten.parts.comm.compression_settings import CompressionSettings
from hasten.parts.distributed.compressed_shards import CopiedShards, ShardedGradients
from hasten.parts.distributed.fsdp import ShardGroup, rows_of, shard
from hasten.parts.distributed.mesh import MeshSizes, data_mesh
from hasten.techniques.communication.compressed import members

METHODS = ("half", "bf16", "int8", "int4", "topk")
STEPS, PASSES, DENSE, GIVEN_UP = 6, 2, 1, 3


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(5, 300))  # 5 rows: shards aren't of one size
        self.vector = nn.Parameter(torch.zeros(7))
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Given(), Given()])
        self.last = nn.Parameter(torch.zeros(11, 40))

    def forward(self, gifts: dict[str, Tensor]) -> Tensor:
        total = (self.last * gifts["last"]).sum()
        for index, block in enumerate(self.blocks):
            total = total + block(gifts[f"blocks.{index}.matrix"], gifts[f"blocks.{index}.vector"])
        return total


def _gifts(
    shapes: dict[str, tuple[int, ...]], rank: int, step: int, turn: int
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sums(world: World, sizes: MeshSizes, method: str) -> dict[str, Any]:
    """What was given on all ranks beside what was applied and what is still remembered."""
    module, mesh = Twice(), sizes.build("cpu")
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    shard(module, data_mesh(mesh, copies=False))
    settings = CompressionSettings(method=method, minimum=0, dense_steps=DENSE)
    copied = sizes.dp > 1
    exchange = CopiedShards(settings, members(mesh)) if copied else ShardedGradients(settings)
    exchange.attach(module)
    due = {name: torch.zeros(shape) for name, shape in shapes.items()}
    applied = {name: torch.zeros(shape) for name, shape in shapes.items()}
    predicted = exchange.predicted()
    for step in range(STEPS):
        for turn in range(PASSES):
            exchange.passes(turn == PASSES - 1)
            module(_gifts(shapes, world.rank, step, turn)).backward()
        if step != GIVEN_UP:
            exchange.confirm()
            for rank in range(world.size):
                for turn in range(PASSES):
                    for name, value in _gifts(shapes, rank, step, turn).items():
                        due[name] += value / world.size
        for name, p in module.named_parameters():
            if step != GIVEN_UP and isinstance(p.grad, DTensor):
                applied[name] += p.grad.full_tensor()
            p.grad = None
    exchange.passes(True)  # the last step is over
    owed = exchange.state()["residual"]
    place = mesh.get_local_rank("shard")
    apart = max(
        float(_apart(group, due, applied, owed, copied, place).abs().max())
        for group in exchange.groups
    )
    return {
        "apart": apart,
        "remembers": sorted(owed),
        "largest": max(float(v.abs().max()) for v in due.values()),
        "sent": exchange.sent_bytes,
        "predicted": predicted,
        "numbers": sum(group.row for group in exchange.groups),
    }


def _apart(
    group: ShardGroup,
    due: dict[str, Tensor],
    applied: dict[str, Tensor],
    owed: dict[str, Tensor],
    copied: bool,
    place: int,
) -> Tensor:
    """This rank's row of what was given, less what was applied and the mean of what is owed."""
    cpu = torch.device("cpu")
    missing = rows_of(due, group, cpu)[place] - rows_of(applied, group, cpu)[place]
    if not owed:
        return missing
    if copied:
        mine = torch.cat([owed[f"shard of {w.name}"] for w in group.weights])
        held = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(held, mine)
        # Ranks are numbered with shards inside copies: those alike in place have this row.
        return missing - torch.stack(held[place :: group.ranks]).mean(0)
    rows = rows_of(owed, group, cpu)
    dist.all_reduce(rows)
    return missing - rows[place] / group.ranks


def parts_on_two(world: World) -> dict[str, Any]:
    return {method: sums(world, MeshSizes(shard=2), method) for method in METHODS}


def parts_on_four(world: World) -> dict[str, Any]:
    return {method: sums(world, MeshSizes(dp=2, shard=2), method) for method in METHODS}
