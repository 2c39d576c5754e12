"""Keywords of the articles' classes that no test of their parts shows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parts.checkpoint import SmartCheckpointer


def test_a_gradient_is_clipped_to_the_norm_that_was_given() -> None:
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    moves = []
    for norm in (None, 0.01):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        before = [p.detach().clone() for p in model.parameters()]
        trainer = hasten.OptimizedTrainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            nn.CrossEntropyLoss(),
            max_grad_norm=norm,
        )
        trainer.train(DataLoader(TensorDataset(x, y), batch_size=8))
        moved = [p - b for p, b in zip(model.parameters(), before, strict=True)]
        moves.append(torch.cat([m.flatten() for m in moved]).norm().item())
    assert moves[1] == pytest.approx(0.01, rel=1e-3)
    assert moves[0] > 0.05


def test_the_memory_of_the_device_that_was_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def meter(device: Any) -> Any:
        asked.append(device)
        return lambda: (0.0, 1.0)

    monkeypatch.setattr("hasten.parts.data.dynamic_batch.memory_meter", meter)
    hasten.DynamicBatcher(device="meta")
    assert asked == ["meta"]


def test_the_group_of_a_pipeline_is_the_one_that_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"mine": 3, "all": 5}
    where = "hasten.parts.distributed.pipeline.model.dist"
    monkeypatch.setattr(f"{where}.is_initialized", lambda: True)
    monkeypatch.setattr(f"{where}.get_world_size", lambda group=None: sizes[group or "all"])
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    group: Any = "mine"
    with pytest.raises(ValueError, match="2 stages and its group 3 ranks"):
        hasten.AsyncPipeline(2, group=group).partition_model(layers)


def test_a_checkpointer_s_interval_is_made_of_its_settings(tmp_path: Path) -> None:
    asked: list[Any] = []

    def of_ranks(own: Any) -> list[Any]:
        asked.append(own)
        return [own]

    model = nn.Linear(2, 2)
    settings = {"longest_loss": 7.0, "between_failures": 11.0, "of_ranks": of_ranks}
    keeper = SmartCheckpointer(3, folder=tmp_path, **settings)
    with contextlib.closing(keeper):
        assert keeper.interval.longest_loss == 7.0
        assert keeper.interval.between_failures == 11.0
        assert keeper.interval.seconds() <= 7.0
        keeper.protect(model=model)
        assert [step for step in range(1, 7) if keeper.after_step(step)] == [3, 6]
    assert [due for due, _ in asked] == [True, True]
