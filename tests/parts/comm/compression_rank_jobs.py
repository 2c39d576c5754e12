"""Compressed gradients on several ranks: what every method does, as plain JSON values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.machine.environment import World
from parts.comm.compression_kit import (
    METHODS,
    Small,
    averaged,
    compressor,
    inputs,
    loss_of,
    memory,
    replicas,
    same_everywhere,
)


def every_method(world: World) -> dict[str, Any]:
    return {
        "trained": {m: _trained(m, world) for m in METHODS},
        "conserved": {m: _conserved(m, world) for m in ("int8", "int4", "topk", "powersgd")},
        "close": {m: _one_mean(m, world) for m in METHODS},
        "bytes": {m: _bytes(m) for m in METHODS},
        "dgc": _momentum(),
        "fp16": {m: _in_fp16(m) for m in ("none", "int4")},
    }


def _trained(method: str, world: World) -> dict[str, Any]:
    """DDP with small buckets, AdamW and clipping."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(30):
        loss = loss_of(ddp, inputs(world.rank, step % 4))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    c.check(ddp.parameters())
    return {
        "first": losses[0],
        "last": losses[-1],
        "same": same_everywhere(list(ddp.parameters())),
        "norms": norms,
        "names": sorted(memory(c)),
    }


def _conserved(method: str, world: World) -> float:
    """Greatest error of: all that was given = all that was applied + mean of the memories."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    given: dict[str, Tensor] = {}
    applied: dict[str, Tensor] = {}
    for step in range(8):
        x = inputs(world.rank, step)
        alone = Small()
        loss_of(alone, x).backward()
        loss_of(ddp, x).backward()
        if step >= 2:  # compressed from here on
            for (name, p), q in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
                if p.grad is not None and q.grad is not None:
                    given[name] = given.get(name, torch.zeros(())) + q.grad.double()
                    applied[name] = applied.get(name, torch.zeros(())) + p.grad.double()
        ddp.zero_grad()
    left = memory(c)
    errors = []
    for name, total in given.items():
        expected = averaged(total)
        found = applied[name] + averaged(left[name]).view_as(total)
        errors.append(float((found - expected).norm() / expected.norm()))
    return max(errors)


def _one_mean(method: str, world: World) -> dict[str, float]:
    """The first compressed mean of a plain loop against float64."""
    model, c = Small(), compressor(method)
    loss_of(model, inputs(world.rank, 0)).backward()
    exact = [averaged(torch.zeros(p.shape) if p.grad is None else p.grad) for p in _all(model)]
    c.synchronize_gradients(model)
    error = sum(float((p.grad - e).square().sum()) for p, e in zip(_all(model), exact, strict=True))  # type: ignore[operator]
    size = sum(float(e.square().sum()) for e in exact)
    same = same_everywhere([p.grad for p in _all(model) if p.grad is not None])
    return {"error": (error / size) ** 0.5, "same": float(same)}


def _all(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _bytes(method: str) -> dict[str, int]:
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(12)))
    ddp, c = replicas(model), compressor(method)
    before = c.predicted(model, bucket_cap_mb=0.01)
    c.attach(ddp)
    sizes = []
    for _ in range(4):
        start = c.sent_bytes
        ddp(torch.ones(2, 96)).sum().backward()
        sizes.append(c.sent_bytes - start)
    numbers = sum(p.numel() for p in model.parameters())
    return {
        "predicted before": before,
        "predicted": c.predicted(model),
        "sent": sizes[-1],
        "dense": sizes[0],
        "numbers": numbers,
    }


def _momentum() -> float:
    """With everything sent no velocity is left, so that what arrives is the gradient itself."""
    c = compressor("topk", compression_ratio=1.0, momentum=0.9)
    weight = nn.Parameter(torch.zeros(600))
    worst = 0.0
    for step in range(3):
        weight.grad = torch.randn(600, generator=torch.Generator().manual_seed(step))
        given = weight.grad.double()
        c.synchronize_gradients([weight])
        assert weight.grad is not None
        worst = max(worst, float((weight.grad - given).abs().max() / given.abs().max()))
    return worst


def _in_fp16(method: str) -> list[int]:
    """Of a gradient that travels in full: bytes sent and predicted, and its error."""
    c = compressor(method, minimum=10**6)
    weight = nn.Parameter(torch.zeros(5000, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    c.synchronize_gradients([weight])
    return [c.sent_bytes, c.predicted([weight]), int((weight.grad != 1).sum())]


def four(world: World) -> dict[str, Any]:
    """What could depend on the number of ranks: short shards, sums, bytes."""
    found: dict[str, Any] = {"same": {m: _one_mean(m, world)["same"] == 1.0 for m in METHODS}}
    model, c = Small(), compressor("int4")
    for step in range(2):
        before = c.sent_bytes
        loss_of(model, inputs(world.rank, step)).backward()
        c.synchronize_gradients(model)
    found["sent"], found["predicted"] = c.sent_bytes - before, c.predicted(model)
    found["conserved"] = _conserved("int4", world)
    return found
