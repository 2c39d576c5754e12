"""A small model with running sums trained by DDP as it is and with late reduction, on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.distributed.ddp import reduce_now


def both_ways(world: World) -> dict[str, Any]:
    plain, late = _trained(world, late=False), _trained(world, late=True)
    found = {f"plain{k}": v for k, v in plain.items()} | {f"late{k}": v for k, v in late.items()}
    found["after failures"] = _trained(world, late=True, failing=1)[""]
    return found | {"rarely used": _rarely_used(world)}


def _trained(world: World, late: bool, failing: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 2)).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)  # type: ignore[arg-type]
    sent = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses other annotations
        sent.append(bucket.buffer().numel())
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(world.rank)
    for step in range(4):
        x = torch.randn(5, 6, generator=data, dtype=torch.float64)
        if failing == world.rank and step > 0:
            kept = [b.clone() for b in model.buffers()]
            model(x[:3]).square().mean().backward()  # half-way, then memory runs out
            optimizer.zero_grad()
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)
        (model if late else ddp)(x).square().mean().backward()
        if late:
            reduce_now(ddp)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()[::50],
        " buffers": model[1].running_mean.tolist(),  # type: ignore[operator, union-attr]
        " sent": sum(sent),
    }


def _rarely_used(world: World) -> float:
    weight = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))])
    module = nn.Module()
    module.weights = weight
    ddp = DistributedDataParallel(module)
    weight[0].backward(torch.tensor(1.0))
    if world.rank == 0:
        weight[1].backward(torch.tensor(3.0))
    reduce_now(ddp)
    assert weight[1].grad is not None
    return float(weight[1].grad)
