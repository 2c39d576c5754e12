"""``dynamic_batch`` of OptimizedTrainer joins batches of the loader as far as memory allows."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import DynamicBatcher, OptimizedTrainer
from hasten.core import context as facts
from hasten.core.context import ExampleStats
from hasten.techniques import batch
from hasten.techniques.batch import AdaptiveBatch


@pytest.fixture(autouse=True)
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, and the tests before have taken of it."""
    monkeypatch.setattr(batch, "memory_meter", lambda device: lambda: (0.0, 1e12))


def trained(
    batches: list[Any], dynamic: Any, epochs: int = 3
) -> tuple[Tensor, dict[str, Any], list[int]]:
    """Weights, summary, and examples of each pass."""
    torch.manual_seed(0)
    model, passes = nn.Linear(5, 3).double(), list[int]()
    model.register_forward_hook(lambda module, given, out: passes.append(len(given[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = OptimizedTrainer(model, optimizer, nn.CrossEntropyLoss(), dynamic_batch=dynamic)
    summary = trainer.train(batches, epochs=epochs)
    return model.weight.detach().clone(), summary, passes


def halves(of: int) -> tuple[list[Any], list[Any]]:
    """24 examples in batches of so many, and in steps of twice as many."""
    x, y = torch.randn(24, 5).double(), torch.randint(0, 3, (24,))
    return [
        [(x[i : i + size], y[i : i + size]) for i in range(0, 24, size)] for size in (of, 2 * of)
    ]


def test_a_technique_of_one_s_own_leaves_training_as_it_was() -> None:
    batches, _ = halves(12)
    weights, summary, passes = trained(batches, AdaptiveBatch(4, 64))
    assert summary["switches"]["dynamic_batch"] == "adaptive_batch(initial_size=4, max_size=64)"
    torch.testing.assert_close(weights, trained(batches, False)[0], rtol=1e-10, atol=1e-12)
    assert passes[:3] == [4, 4, 4]
    assert summary["examples_per_step"] == {"least": 12, "mean": 12, "most": 12}


def test_the_articles_batch_grows_over_batches_of_the_loader_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches, joined = halves(6)
    weights, summary, passes = trained(batches, DynamicBatcher(12, 12))
    assert passes == [12] * 6  # two batches of 6 are a step of one pass
    torch.testing.assert_close(weights, trained(joined, False)[0], rtol=1e-10, atol=1e-12)
    assert summary["effective"]["dynamic_batch"]["effective"]
    assert summary["examples_per_step"] == {"least": 12, "mean": 12, "most": 12}
    said = capsys.readouterr().out
    assert "dynamic_batch: 6 -> 12 examples a step; the learning rate stays as it is" in said
    _, summary, passes = trained(batches, True)
    assert max(passes) == 24
    assert summary["steps"] == 3


def test_a_step_shrinks_to_what_fits_and_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(batch, "memory_meter", lambda device: lambda: (float(seen[-1]), 10.0))
    x, y = torch.randn(48, 5).double(), torch.randint(0, 3, (48,))
    model = nn.Linear(5, 3).double()
    model.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = OptimizedTrainer(
        model, optimizer, nn.CrossEntropyLoss(), dynamic_batch=DynamicBatcher(4, 64)
    )
    summary = trainer.train([(x[i : i + 4], y[i : i + 4]) for i in range(0, 48, 4)], epochs=6)
    assert sum(seen) == 6 * 48
    assert 8 < max(seen) < 16  # once over the threshold of 8 examples
    assert max(seen[-6:]) == 8
    assert summary["examples_per_step"]["most"] <= 16


@pytest.mark.parametrize("texts", [False, True])
def test_batches_of_other_forms_are_not_joined(texts: bool) -> None:
    seen: list[Any] = []

    def loss(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return output.square().mean()

    rows = [(torch.ones(2, 5), ["a", "b"] if texts else torch.zeros(2))]
    rows += [(torch.ones(2, 5), ["c", "d"] if texts else torch.zeros(2))]
    rows += [(torch.ones(2, 5, dtype=torch.half).float(), torch.zeros(2, 1))]
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizedTrainer(model, optimizer, loss, dynamic_batch=True).train(rows)
    assert len(seen) == 2
    assert seen[0] == ["a", "b", "c", "d"] if texts else len(seen[0]) == 4


def test_growing_is_refused_where_the_recipe_says_the_step() -> None:
    known = replace(facts.seen_at_start(), examples=ExampleStats(count=10, tokens=10, longest=1))
    assert "global_batch_size" in AdaptiveBatch(grow=True).unsupported_reasons(known)[0]
    assert not AdaptiveBatch().unsupported_reasons(known)


def test_a_run_resumed_in_an_epoch_trains_the_records_that_were_left(tmp_path: Path) -> None:
    """The steps of the epoch that are done are left out as they were, not as they would be now."""
    x, y = torch.arange(40.0)[:, None].expand(40, 5).double(), torch.randint(0, 3, (40,))
    batches = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 40, 2)]
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if stop_at and len(seen) >= stop_at:
            signal.raise_signal(signal.SIGINT)
        return nn.functional.cross_entropy(output, target)

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        model.register_forward_hook(lambda module, given, out: seen.extend(given[0][:, 0].tolist()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        trainer = OptimizedTrainer(model, optimizer, loss, dynamic_batch=DynamicBatcher(2, 8))
        trainer.train(batches, checkpoint_dir=tmp_path, resume=True)

    stop_at = 10
    run()
    assert 0 < len(seen) < 40
    stop_at = 0
    run()
    assert seen == x[:, 0].tolist()
