"""A small model, its data, and what jobs of compressed gradients look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.comm.gradient_compressor import GradientCompressor

METHODS = ("none", "half", "bf16", "int8", "int4", "topk", "powersgd")
LEARNT = ("none", "int4", "topk", "powersgd")  # int8 has the code of int4
WIDE = 40


class Small(nn.Module):
    """Two layers and a head that is tied to the first, with a bias and a norm's vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDE, 64)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, WIDE)
        self.head = nn.Linear(WIDE, 64, bias=False)
        self.head.weight = self.first.weight  # tied
        self.rare = nn.Linear(64, 32)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        found: Tensor = self.head(self.second(self.norm(self.first(x)).relu()))
        return self.rare(found) if rare else found


def compressor(method: str, **changes: Any) -> GradientCompressor:
    settings = {"minimum": 0, "compression_ratio": 0.1, "rank": 4, **changes}
    return GradientCompressor(sparsity_method=method, communication_backend="gloo", **settings)


def replicas(model: nn.Module, **changes: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **changes)  # type: ignore[arg-type]


def inputs(rank: int, step: int) -> Tensor:
    dice = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, WIDE, generator=dice)


def target(x: Tensor) -> Tensor:
    mix = torch.randn(WIDE, 64, generator=torch.Generator().manual_seed(7))
    return (x @ mix).tanh()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - target(x)).square().mean()


def same_everywhere(tensors: list[Tensor]) -> bool:
    """Whether all ranks have the same bits."""
    flat = torch.cat([t.detach().float().flatten() for t in tensors])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(row, rows[0]) for row in rows)


def averaged(values: Tensor) -> Tensor:
    """Float64 mean over ranks, the reference."""
    found = values.double().clone()
    dist.all_reduce(found)
    return found / dist.get_world_size()


def memory(c: GradientCompressor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = c.state_dict()["travel"]["residual"]
    return found


def given_and_applied(
    ddp: DistributedDataParallel, world: World, after_step: Callable[[], object] = lambda: None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By name, what this rank's gradients and the averaged ones add up to in the compressed steps
    of eight."""
    given: dict[str, Tensor] = {}
    applied: dict[str, Tensor] = {}
    for step in range(8):
        x, alone = inputs(world.rank, step), Small()
        loss_of(alone, x).backward()
        loss_of(ddp, x).backward()
        pairs = zip(ddp.module.named_parameters(), alone.parameters(), strict=True)
        for (name, p), q in pairs:
            if step >= 2 and p.grad is not None and q.grad is not None:
                given[name] = given.get(name, torch.zeros(())) + q.grad.double()
                applied[name] = applied.get(name, torch.zeros(())) + p.grad.double()
        after_step()
        ddp.zero_grad()
    return given, applied
