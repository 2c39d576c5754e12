"""Compressed gradients on several ranks: what every method does, and each thing that can go wrong.

Each function returns what the tests of ``tests/parts/test_gradient_compressor.py`` look at.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.core.facts import World
from hasten.parts import codecs
from hasten.parts.compression.exchange import WireError
from hasten.parts.gradient_compressor import GradientCompressor

METHODS = ("none", "half", "bf16", "int8", "int4", "topk", "powersgd")
LEARNT = "none", "int8", "int4", "topk", "powersgd"
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


def every_method(world: World) -> dict[str, Any]:
    return {
        "trained": {m: _trained(m, world) for m in METHODS},
        "conserved": {m: _conserved(m, world) for m in ("int8", "int4", "topk", "powersgd")},
        "close": {m: _one_mean(m, world) for m in METHODS},
        "bytes": {m: _bytes(m) for m in METHODS},
        "dgc": _momentum(world),
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


def _momentum(world: World) -> float:
    """With everything sent, the corrected form is plain momentum (a loop in float64)."""
    c = compressor("topk", compression_ratio=1.0, momentum=0.9)
    weight = nn.Parameter(torch.zeros(600))
    velocity, worst = torch.zeros(600, dtype=torch.float64), 0.0
    for step in range(3):
        weight.grad = torch.randn(600, generator=torch.Generator().manual_seed(step))
        velocity = torch.zeros_like(velocity) + weight.grad.double()  # what was sent is taken out
        c.synchronize_gradients([weight])
        assert weight.grad is not None
        worst = max(worst, float((weight.grad - velocity).abs().max() / velocity.abs().max()))
    return worst


def trouble(world: World) -> dict[str, Any]:
    return {
        "infinite": {m: _infinite(m, world) for m in LEARNT},
        "accumulated": _accumulated(world),
        "scaled": {m: _scaled(m, world) for m in ("int4", "topk", "powersgd")},
        "bf16": {m: _formats(m, world, torch.bfloat16) for m in LEARNT},
        "unused": _unused(world),
        "frozen": _frozen(world),
        "hand": {m: _by_hand(m, world) for m in METHODS},
        "resumed": {m: _resumed(m, world) for m in LEARNT},
        "drifted": _error(lambda: _drifted(world)),
        "disagreeing": _error(lambda: _disagreeing(world)),
        "ended": _codec_fails(world),
    }


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except (WireError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _infinite(method: str, world: World) -> dict[str, Any]:
    """Rank 1 has one infinite number in one step: what all ranks see, and what is remembered."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor(method)
    c.attach(ddp)
    seen, before = [], {}
    for step in range(6):
        if step == 4:
            before = memory(c)
        x = inputs(world.rank, step)
        if step == 4 and world.rank == 1:
            x[0, 0] = torch.inf
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


def _accumulated(world: World) -> dict[str, Any]:
    """Four micro-batches to a step: memory moves once, as with their sum in one pass."""
    found = []
    for pieces in (1, 4):
        ddp, c = replicas(Small(), find_unused_parameters=True), compressor("int4")
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
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    losses = []
    for step in range(16):
        x = inputs(world.rank, step % 2)
        loss = (ddp(x.to(dtype)).float() - target(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    formats = sorted({str(v.dtype) for v in memory(c).values()})
    same = same_everywhere(list(ddp.parameters()))
    return {"first": losses[0], "last": losses[-1], "formats": formats, "same": same}


def _unused(world: World) -> dict[str, Any]:
    """A layer that only rank 0 uses, in some steps only; then nobody does."""
    ddp, c = replicas(Small(), find_unused_parameters=True), compressor("int4")
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


def _frozen(world: World) -> dict[str, Any]:
    """Low-rank adapters beside frozen weights: only adapters travel."""
    model = Small()
    model.requires_grad_(False)
    down, up = nn.Linear(WIDE, 4, bias=False), nn.Linear(4, 64, bias=False)
    nn.init.zeros_(up.weight)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = model, down, up

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.base(x) + self.up(self.down(x))
            return found

    torch.manual_seed(1)
    ddp, c = replicas(Adapted()), compressor("int8")
    c.attach(ddp)
    optimizer = torch.optim.AdamW([down.weight, up.weight], lr=1e-2)
    for step in range(5):
        loss_of(ddp, inputs(world.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"names": sorted(memory(c)), "same": same_everywhere([up.weight])}


def _by_hand(method: str, world: World) -> dict[str, Any]:
    """The articles' loop: each gradient is compressed by hand, then all are averaged."""
    model, c = Small(), compressor(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dist_error, losses = 0.0, []
    for step in range(12):
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


def _resumed(method: str, world: World) -> dict[str, Any]:
    """Killed after the fourth step and gone on with from its state, against one never stopped."""
    whole, stopped = [], []
    for found, stop in ((whole, False), (stopped, True)):
        model, c = Small(), compressor(method)
        for step in range(7):
            if step == 4 and stop:
                state = c.state_dict()
                c = compressor(method)
                c.load_state_dict(state)
            model.zero_grad()
            loss_of(model, inputs(world.rank, step)).backward()
            c.synchronize_gradients(model)
        found += [p.grad for p in model.parameters()]
    pairs = zip(whole, stopped, strict=True)
    return {"same": all(a is not None and torch.equal(a, b) for a, b in pairs)}


def _drifted(world: World) -> None:
    c, weight = compressor("int8"), torch.ones(100)
    c.check([weight])
    weight[world.rank] = 2.0
    c.check([weight])


def _disagreeing(world: World) -> None:
    method = "int4" if world.rank else "int8"
    compressor(method).attach(replicas(nn.Linear(4, 4)))


class FailsLate(codecs.Quantised):
    """A codec that can't decode what has arrived."""

    def __init__(self) -> None:
        super().__init__(8)

    def decode_mean(self, *given: Any, **named: Any) -> Tensor:
        raise ArithmeticError("no such codes")


def _codec_fails(world: World) -> str:
    """Rank 1's own code fails in the second stage; each rank says what it saw, in bounded time."""
    ddp, c = replicas(nn.Linear(64, 64)), compressor("int8", timeout_seconds=3.0)
    c.attach(ddp)
    way: Any = c._travel.way

    said = ""
    for step in range(4):
        if step == 3 and world.rank == 1:
            way.codec = FailsLate()
        said = _error(lambda: ddp(torch.ones(2, 64)).sum().backward())
    return said


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught]


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
