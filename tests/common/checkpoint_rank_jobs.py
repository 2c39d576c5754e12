"""A run with dropout on ranks that is saved, ended, and gone on with; its folder is the current."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from feed_rank_jobs import with_dropout
from hasten.core.job import Stop
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.machine.environment import World
from hasten.parts.checkpoint import SmartCheckpointer
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from tiny import examples, language_job, session_of
from told import refusal


def saved_and_resumed(world: World) -> dict[str, Any]:
    whole = [m.loss for m in training(_session(world, "whole"))]
    first = _session(world, "halved")
    taken = training(first)
    begun = [next(taken).loss for _ in range(5)]  # of which two steps are lost
    taken.close()
    random.seed(99 + world.rank)
    torch.manual_seed(99 + world.rank)
    second = _session(world, "halved")
    path = second.setup.checkpoint.resume(second)
    draws = [random.random(), torch.rand(1).item()]
    second.setup.checkpoint.resume(second)
    rest = [m.loss for m in training(second)]
    stopped = _session(world, "stopped")
    for metrics in training(stopped):  # one rank is asked to stop, and all save the same step
        stopped.stop_requested = metrics.step == 4 and world.rank == world.size - 1
    return {
        "whole": whole,
        "begun": begun,
        "rest": rest,
        "draws": draws,
        "from": path.name if path else None,
        "stopped": stopped.progress.step,
        "saved": sorted(p.name for p in Path("stopped").iterdir()),
    }


def plain_loop(world: World) -> dict[str, Any]:
    """SmartCheckpointer alone: every rank makes the same calls, and the first one writes."""

    def begin(interval: Any) -> tuple[Any, Any, SmartCheckpointer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        keeper = SmartCheckpointer(interval, folder=Path("plain"), longest_loss=0.02)
        return model, optimizer, keeper.protect(model=model, optimizer=optimizer)

    def step(model: Any, optimizer: Any) -> float:
        loss = model(torch.ones(8, 4)).square().mean() + 0 * random.random()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # replicas: the same weights, other dropout
            dist.all_reduce(parameter.grad)
        optimizer.step()
        return loss.item() + random.random()

    model, optimizer, keeper = begin("dynamic")
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    saved = []
    for number in range(1, 41):
        step(model, optimizer)
        time.sleep(0.002 * world.rank)  # clocks differ, decisions don't
        saved += [number] if keeper.after_step(number) else []
    keeper.save(41)
    keeper.saver.wait_for_writer()
    after = [step(model, optimizer) for _ in range(3)]
    keeper.close()
    dist.barrier()
    model, optimizer, again = begin("dynamic")
    restored = again.restore() is model
    found = {"saved": saved, "restored": restored, "step": again.step}
    found |= {"after": after, "again": [step(model, optimizer) for _ in range(3)]}
    again.close()
    return {**found, "sharded": _sharded(world)}


def _sharded(world: World) -> str:
    """What is said of a module whose weights are spread over ranks."""
    model = torch.nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (world.size,))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
    return refusal(SmartCheckpointer(folder=Path("sharded")).protect, model=model)


def _session(world: World, folder: str) -> Session:
    job = language_job(with_dropout, data=examples(21), batch=4, stop=Stop(epochs=2))
    session = session_of(job, Checkpoints(3), DDP(), folder=Path(folder), world=world)
    random.seed(world.rank)
    return session
