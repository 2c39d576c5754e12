"""Two ranks and the articles' names: gradual optimisation, a benchmark, growing batches."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import OptimizedTrainer, PipeDream, benchmark, gradual_optimize
from hasten.machine.environment import World
from hasten.techniques.batch import GradientAccumulation
from hasten.techniques.communication.compress import Half


def data(count: int = 96) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, generator=draw)
    return TensorDataset(x, (x @ torch.randn(5, 3, generator=draw)).argmax(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def everything(world: World) -> dict[str, Any]:
    jobs = (gradual, rate, grown, pipe)
    return {job.__name__: job(world) for job in jobs}


def gradual(world: World) -> dict[str, Any]:
    network = model()
    found = gradual_optimize(
        network,
        DataLoader(data(), batch_size=4),
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        techniques=[Half(), GradientAccumulation(micro_batch_size=2)],
        rounds=2,
        steps=2,
    )
    return {
        "rungs": found.climb.rows(),
        "examples": found.summary["examples_per_step"],
        "weights": network.weight.tolist(),  # type: ignore[union-attr, operator]
    }


def rate(world: World) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = benchmark(model(), DataLoader(data(), batch_size=4))
    return {"rate": found, "said": said.getvalue()}


def grown(world: World) -> dict[str, Any]:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    trainer = OptimizedTrainer(network, optimizer, nn.CrossEntropyLoss(), dynamic_batch=True)
    summary = trainer.train(DataLoader(data(), batch_size=2), epochs=2)
    whole = summary["examples_per_step"]
    return {"most": whole["most"], "all": whole["mean"] * summary["steps"]}


def pipe(world: World) -> str:
    try:
        PipeDream(nn.Sequential(nn.Linear(2, 2)))
    except ValueError as error:
        return str(error)
    return ""
