"""Gradients reduced late are those that DDP reduces while it computes, by the same hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.distributed.ddp import reduce_now
from ranks import once_on_ranks


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


found = once_on_ranks(both_ways)


def test_weights_after_some_steps_are_those_of_plain_ddp(found: list[Any]) -> None:
    for rank in found:
        assert rank["late"] == pytest.approx(rank["plain"], rel=1e-12, abs=1e-14)
    assert found[0]["late"] == found[1]["late"]


def test_running_sums_are_those_of_rank_0_on_every_rank(found: list[Any]) -> None:
    assert found[0]["late buffers"] == found[1]["late buffers"]
    assert found[0]["late buffers"] == pytest.approx(found[0]["plain buffers"], rel=1e-12)


def test_a_communication_hook_sees_every_bucket_once_a_step(found: list[Any]) -> None:
    for rank in found:
        assert rank["late sent"] == rank["plain sent"] > 0


def test_a_weight_without_a_gradient_is_averaged_as_zero(found: list[Any]) -> None:
    # Only rank 0 used it, with a gradient of 3.
    assert [rank["rarely used"] for rank in found] == [1.5, 1.5]


def test_failed_passes_of_one_rank_leave_no_trace(tmp_path: Path, found: list[Any]) -> None:
    for rank in found:
        assert rank["after failures"] == rank["late"]
