"""Compressed gradients on several ranks: each thing that can go wrong, as plain JSON values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.machine.environment import World
from hasten.parts.comm import codecs
from parts.comm.compression_kit import (
    LEARNT,
    METHODS,
    WIDE,
    Small,
    averaged,
    compressor,
    inputs,
    loss_of,
    memory,
    replicas,
    same_everywhere,
    target,
)
from told import refusal


def troubled(world: World) -> dict[str, Any]:
    return {
        "infinite": {m: infinite(m, world) for m in LEARNT},
        "accumulated": {m: _accumulated(m, world) for m in LEARNT},
        "scaled": {m: _scaled(m, world) for m in ("int4", "topk", "powersgd")},
        "bf16": {m: _formats(m, world, torch.bfloat16) for m in LEARNT},
        "unused": {m: _unused(m, world) for m in LEARNT},
        "resumed": {m: resumed(m, world) for m in LEARNT},
        "hand": {m: _by_hand(m, world) for m in METHODS},
        "drifted": refusal(_drifted, world),
        "disagreeing": refusal(_disagreeing, world),
        "complex": {m: refusal(_complex, m) for m in METHODS},
        "empty": {m: refusal(_empty, m) for m in METHODS},
        "ended": _codec_fails(world),  # the last: nothing is sent after it
    }


def _complex(method: str) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.full((3,), 1 + 2j)
    compressor(method).synchronize_gradients([weight])
    assert weight.grad.tolist() == [1 + 2j] * 3


def _empty(method: str) -> None:
    weights = [nn.Parameter(torch.ones(0, 3))]
    compressor(method).synchronize_gradients(weights)


def infinite(method: str, world: World, **changes: Any) -> dict[str, Any]:
    """Rank 1 has one infinite number in one step: what all ranks see, and what is remembered.

    Other buckets of that step are finite, and what they left out isn't remembered either.
    """
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method, **changes)
    c.attach(ddp)
    seen, before, bad = [], {}, torch.zeros(WIDE, 64, dtype=torch.bool)
    ddp.module.second.weight.register_hook(lambda grad: grad.masked_fill(bad, torch.inf))
    for step in range(6):
        if step == 4:
            before = memory(c)
        bad[0, 0] = step == 4 and world.rank == 1
        x = inputs(world.rank, step)
        loss_of(ddp, x).backward()
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        seen.append(all(bool(g.isfinite().all()) for g in grads))
        if step == 4:
            after = memory(c)
        ddp.zero_grad()
    kept = before.keys() == after.keys()
    return {
        "finite": seen,
        "memory stays": kept and all(torch.equal(before[k], after[k]) for k in before),
        "memory": sum(float(v.abs().sum()) for v in before.values()),
    }


def _accumulated(method: str, world: World) -> dict[str, Any]:
    """Four micro-batches to a step: memory moves once, as with their sum in one pass."""
    found = []
    for pieces in (1, 4):
        ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
        c.attach(ddp)
        for step in range(4):
            x = torch.cat([inputs(world.rank, 10 * step + k) for k in range(4)])
            for k, part in enumerate(x.chunk(pieces)):
                if k < pieces - 1:
                    with ddp.no_sync():
                        (loss_of(ddp, part) / pieces).backward()
                else:
                    (loss_of(ddp, part) / pieces).backward()
            if step < 3:
                ddp.zero_grad()
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        found.append(torch.cat([g.flatten() for g in grads]))
        steps = c.steps
    return {"error": float((found[0] - found[1]).norm() / found[0].norm()), "steps": steps}


def _scaled(method: str, world: World) -> dict[str, float]:
    """A loss scale that falls after a step: gradients over scale, and memory, as without one."""
    found = []
    for scales in ((1.0,) * 6, (64.0, 64.0, 64.0, 16.0, 16.0, 16.0)):
        ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
        now = {"scale": 1.0}
        c.attach(ddp, loss_scale=lambda now=now: now["scale"])  # type: ignore[misc]
        for step, scale in enumerate(scales):
            ddp.zero_grad()
            now["scale"] = scale
            (loss_of(ddp, inputs(world.rank, step)) * scale).backward()
        grads = [p.grad / scale for p in ddp.parameters() if p.grad is not None]
        found.append(torch.cat([*(g.flatten() for g in grads), *memory(c).values()]))
    return {"error": float((found[0] - found[1]).norm() / found[0].norm())}


def _formats(method: str, world: World, dtype: torch.dtype) -> dict[str, Any]:
    ddp, c = replicas(Small().to(dtype), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    losses = []
    for step in range(8):
        x = inputs(world.rank, step % 2)
        loss = (ddp(x.to(dtype)).float() - target(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    formats = sorted({str(v.dtype) for v in memory(c).values()})
    same = same_everywhere(list(ddp.parameters()))
    return {"first": losses[0], "last": losses[-1], "formats": formats, "same": same}


def _unused(method: str, world: World) -> dict[str, Any]:
    """A layer that only rank 0 uses, in some steps only; then nobody does."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    held = []
    for step in range(8):
        rare = step < 5 and world.rank == 0
        ddp(inputs(world.rank, step), rare).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(memory(c).get("rare.weight", torch.zeros(1)))
    return {
        "same": same_everywhere(list(ddp.parameters())),
        "waits": torch.equal(held[5], held[7]),  # nobody's turn: nothing is lost
        "remembered": float(held[7].abs().sum()),
    }


def _by_hand(method: str, world: World) -> dict[str, Any]:
    """The articles' loop: each gradient is compressed by hand, then all are averaged."""
    model, c = Small(), compressor(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist_error, losses = 0.0, []
    for step in range(8):
        loss = loss_of(model, inputs(world.rank, step % 2))
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad = c.compress(p.grad)
        mine = [averaged(p.grad) for p in model.parameters() if p.grad is not None]
        c.synchronize_gradients(model)
        got = [p.grad for p in model.parameters() if p.grad is not None][: len(mine)]
        if step == 5:
            off = sum(float((a - b).square().sum()) for a, b in zip(mine, got, strict=True))
            dist_error = (off / sum(float(a.square().sum()) for a in mine)) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    same = same_everywhere(list(model.parameters()))
    return {"first": losses[0], "last": losses[-1], "error": dist_error, "same": same}


def resumed(method: str, world: World, **changes: Any) -> bool:
    """Killed after the fourth step and gone on with from its state, against one never stopped."""
    whole, stopped = [], []
    for found, stop in ((whole, False), (stopped, True)):
        model, c = Small(), compressor(method, **changes)
        for step in range(7):
            if step == 4 and stop:
                state = c.state_dict()
                c = compressor(method, **changes)
                c.load_state_dict(state)
            model.zero_grad()
            loss_of(model, inputs(world.rank, step)).backward()
            c.synchronize_gradients(model)
        found += [p.grad for p in model.parameters()]
    pairs = zip(whole, stopped, strict=True)
    return all(a is not None and torch.equal(a, b) for a, b in pairs)


def _drifted(world: World) -> None:
    c, weight = compressor("int8"), torch.ones(100)
    c.check([weight])
    weight[world.rank] = 2.0
    c.check([weight])


def _disagreeing(world: World) -> None:
    method = "int4" if world.rank else "int8"
    compressor(method).attach(replicas(nn.Linear(4, 4)))


class FailsLate(codecs.QuantisedCodec):
    """A codec that can't decode what has arrived."""

    def __init__(self) -> None:
        super().__init__(8)

    def decode_mean(self, *given: Any, **named: Any) -> Tensor:
        raise ArithmeticError("no such codes")


def _codec_fails(world: World) -> str:
    """Rank 1's own code fails in the second stage; each rank says what it saw, in bounded time."""
    ddp, c = replicas(nn.Linear(64, 64)), compressor("int8", timeout_seconds=2.0)
    c.attach(ddp)
    way: Any = c._bucket_exchange.way

    said = ""
    for step in range(4):
        if step == 3 and world.rank == 1:
            way.codec = FailsLate()
        said = refusal(lambda: ddp(torch.ones(2, 64)).sum().backward())
    return said
