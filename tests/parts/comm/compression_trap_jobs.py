"""Compressed gradients on several ranks where exchanges are known to go wrong unseen."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compression_session_jobs import session
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.parts.comm import exchange
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.exchange import SECOND, Ranks
from hasten.techniques.communication.compress import Quantised
from parts.comm.compression_kit import (
    Small,
    averaged,
    compressor,
    inputs,
    loss_of,
    memory,
    replicas,
)

LATE = 0.01  # seconds
LIMIT = 6.0  # seconds until a rank that does not answer counts as gone


def traps(world: World) -> dict[str, Any]:
    return {
        "second stage": _second_stage(world),
        "large": {m: _large(m) for m in ("none", "half", "bf16", "int8", "int4")},
        "dense start": _dense_start(world),
    }


def _second_stage(world: World) -> dict[str, Any]:
    """Second stages of many buckets, each rank's later by another time, and none late."""
    plain, threads, sizes = Ranks.all_gather, set(), []

    def late(self: Ranks, row: Tensor, stage: int) -> Any:
        if stage == SECOND:
            threads.add(threading.get_ident())
            sizes.append(len(row))
            time.sleep(LATE * world.rank)
        return plain(self, row, stage)

    found, buckets = [], 0
    try:
        for way in (plain, late):
            Ranks.all_gather = way  # type: ignore[method-assign]
            ddp, c = replicas(Small(), find_unused_parameters=True), compressor("int8")
            c.attach(ddp)
            for step in range(5):
                ddp.zero_grad()
                loss_of(ddp, inputs(world.rank, step)).backward()
            found.append(torch.cat([p.grad.flatten() for p in _moved(ddp)]))
            buckets = len(c._travel.buckets)
    finally:
        Ranks.all_gather = plain  # type: ignore[method-assign]
    return {
        "same": torch.equal(*found),
        "threads": len(threads),
        "apart": threading.get_ident() not in threads,
        "sizes": sizes,
        "buckets": buckets,
    }


def _moved(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.grad is not None]


def _large(method: str) -> dict[str, float]:
    """Gradients whose sum over ranks fp16 can't hold, though each of them it can."""
    weight, c = nn.Parameter(torch.zeros(1000)), compressor(method)
    weight.grad = torch.full((1000,), 40_000.0)
    c.synchronize_gradients([weight])
    return {"least": float(weight.grad.min()), "most": float(weight.grad.max())}


def _dense_start(world: World) -> list[dict[str, Any]]:
    """Four steps of a loop whose first three go in full."""
    model, c = Small(), compressor("int4", dense_steps=3)
    found = []
    for step in range(4):
        model.zero_grad()
        loss_of(model, inputs(world.rank, step)).backward()
        exact = {n: averaged(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        c.synchronize_gradients(model)
        off = [float((model.get_parameter(n).grad - e).abs().max()) for n, e in exact.items()]
        found.append({"off": max(off), "owed": len(memory(c)), "compresses": c.compresses})
    return found


def uneven(world: World) -> str:
    """Three ranks of two hosts, and a run that wants as many on each."""
    plain = exchange.host_name
    exchange.host_name = lambda: f"host-{world.rank // 2}"
    try:
        session(world, Quantised(scope="hosts"))
    except InputError as error:
        return str(error)
    finally:
        exchange.host_name = plain
    return ""


def three(world: World) -> dict[str, Any]:
    return {"uneven": uneven(world), **ended(world)}


def ended(world: World) -> dict[str, Any]:
    """Rank 2 of three ends between two steps; what the others say, and after how long."""
    codec("int4").encode(torch.ones(256))  # compiled before anybody waits for anybody
    ddp = replicas(Small(), find_unused_parameters=True)
    c = compressor("int4", timeout_seconds=LIMIT)
    c.attach(ddp)
    began, said = time.monotonic(), ""
    try:
        for step in range(20):
            if step == 4 and world.rank == 2:
                # The file that says it ended well, then an end without a farewell.
                Path(os.environ["HASTEN_RENDEZVOUS"]).with_name("rank-2.json").write_text("{}")
                os._exit(0)
            began = time.monotonic()
            loss_of(ddp, inputs(world.rank, step)).backward()
            ddp.zero_grad()
    except RuntimeError as error:
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - began}
