"""A resumed run ends with the bits of one that was never interrupted, whatever its optimizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hasten.integrations.optimized_trainer import OptimizedTrainer
from hasten.integrations.throughput import benchmark
from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.distributed.pipeline.model import Update
from hasten.parts.optim.muon import MuonAdamW


class KeepsMasters(torch.optim.Optimizer):
    """SGD on float32 masters that counts from 2570, which bf16 can't hold."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"master": p.detach().float(), "count": torch.tensor(2570)}
                state["count"] += 1
                state["master"] -= group["lr"] * p.grad.float() / state["count"] * 2570
                p.copy_(state["master"])


class KeepsThePast(torch.optim.SGD):
    """Averages the last two gradients, in a nested state with a text."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            third = p.grad.float() / 3
            past = self.state[p].get("past", {"gradients": [third]})
            p -= 0.1 * (third + past["gradients"][0])
            self.state[p]["past"] = {"gradients": [third], "kind": "mean"}


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{
        name: functools.partial(getattr(torch.optim, name), lr=1e-2)
        for name in (
            *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon"),
            *("NAdam", "RAdam", "RMSprop", "Rprop"),
        )
    },
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "transformers.Adafactor": functools.partial(
        transformers.Adafactor, lr=1e-2, relative_step=False
    ),
    "MuonAdamW": lambda params: MuonAdamW([{"params": params, "muon": True}], lr=1e-2),
    "KeepsMasters": KeepsMasters,
}
NESTED = {"KeepsThePast": KeepsThePast}
FORMATS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(24, 16, bias=False), nn.Tanh(), nn.Linear(16, 20, bias=False)
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(16, 24, generator=draw).to(dtype)
    return TensorDataset(rows, torch.randint(20, (16,), generator=draw))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for x, y in DataLoader(data(dtype), batch_size=4):
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        optimizer.step()


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), two.parameters()))


def alike(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(alike(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    return bool(one == two)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *NESTED])
@FORMATS
def test_a_restored_loop_ends_with_the_bits_of_a_whole_one(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = model_of(dtype)
    build = (OPTIMIZERS | NESTED)[name]
    optimizer = build(list(whole.parameters()))
    train(whole, optimizer, dtype)
    with SmartCheckpointer(interval=100, folder=tmp_path) as keeper:
        keeper.protect(model=whole, optimizer=optimizer).save(4)
    saved = copy.deepcopy(optimizer.state_dict())
    train(whole, optimizer, dtype)
    model = model_of(dtype)
    optimizer = build(list(model.parameters()))
    with SmartCheckpointer(interval=100, folder=tmp_path) as keeper:
        keeper.protect(model=model, optimizer=optimizer).restore()
    assert alike(saved["state"], optimizer.state_dict()["state"])
    train(model, optimizer, dtype)
    assert same(model, whole)


@pytest.mark.parametrize("name", ["Muon", "KeepsMasters"])
@FORMATS
def test_a_resumed_training_ends_with_the_bits_of_a_whole_one(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    def run(epochs: int, folder: Path) -> nn.Module:
        model = model_of(dtype)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        trainer = OptimizedTrainer(model, optimizer, lambda out, y: F.cross_entropy(out.float(), y))
        loader = DataLoader(data(dtype), batch_size=4)
        trainer.train(loader, epochs=epochs, checkpoint_dir=folder, resume=True)
        return model

    whole = run(2, tmp_path / "whole")
    run(1, tmp_path / "parts")
    assert same(run(2, tmp_path / "parts"), whole)


def loaded_by_a_pipeline(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    update = Update(lambda weights: KeepsMasters(list(weights)), 1e-3)
    update.load_state_dict({"optimizer": optimizer.state_dict()})
    update.before(model, parameters_taken=False, group=None)
    return update.state_dict()["optimizer"]


def put_back_by_a_benchmark(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    loader = DataLoader(data(torch.bfloat16), batch_size=4)
    benchmark(model, loader, optimizer=optimizer, loss_fn=lambda out, y: F.cross_entropy(out, y))
    return optimizer.state_dict()


@pytest.mark.parametrize("load", [loaded_by_a_pipeline, put_back_by_a_benchmark])
def test_every_place_that_loads_a_state_keeps_its_bits(load: Any) -> None:
    model = model_of(torch.bfloat16)
    optimizer = KeepsMasters(list(model.parameters()))
    train(model, optimizer, torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    assert alike(saved, load(model, optimizer)["state"])
