"""``benchmark`` trains for its figure and leaves nothing behind."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import InputError, benchmark


def loader(count: int = 40) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 3), torch.randint(0, 2, (count,))), 4)


class Slow(nn.Module):
    """A model whose passes take 10 ms at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(3, 2), nn.BatchNorm1d(3), nn.Dropout()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        self.modes.append(self.training)
        found: Tensor = self.layer(self.drop(self.norm(x)))
        return found


def test_the_rate_is_samples_over_seconds_and_everything_is_put_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Slow().eval()
    model.layer.weight.grad = torch.ones(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    rate = benchmark(model, loader(), 2, optimizer=optimizer)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    loader()  # it draws its examples
    assert torch.equal(drawn, torch.rand(1))
    assert 0 < rate <= 4 / 0.01
    assert len(model.modes) == 2 + 2 * 10  # two passes warm up
    assert all(model.modes)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.layer.weight.grad, torch.ones(2, 3))
    assert not optimizer.state_dict()["state"]
    said = capsys.readouterr().out
    found = re.fullmatch(r"throughput: ([\d.]+) samples/sec \(95 %: ([\d.]+) to ([\d.]+)\)\n", said)
    assert found is not None, said
    low, high = float(found[2]), float(found[3])
    assert float(found[1]) == pytest.approx(rate, abs=0.01)
    assert low <= rate + 0.01
    assert high >= rate - 0.01


def test_the_loss_is_the_caller_s_or_follows_from_the_target() -> None:
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(target))
        return output.square().mean()

    benchmark(nn.Linear(3, 2), loader(8), loss_fn=loss)
    assert calls == [4] * 4
    assert benchmark(nn.Linear(3, 2), [(torch.ones(4, 3), torch.ones(4, 2))]) > 0
    with pytest.raises(ValueError, match="give loss_fn"):
        benchmark(nn.Linear(3, 2), [(torch.ones(4, 3), ["a"] * 4)])


def test_a_language_model_has_its_own_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return type("Output", (), {"loss": (self.layer(x) - labels).square().mean()})()

    assert benchmark(Model(), [{"x": torch.ones(4, 3), "labels": torch.ones(4, 2)}]) > 0


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(InputError, match="gave no batch"):
        benchmark(nn.Linear(3, 2), [])
    with pytest.raises(InputError, match="none in a second pass"):
        benchmark(nn.Linear(3, 2), iter([(torch.ones(4, 3), torch.ones(4, 2))]))
    with pytest.raises(InputError, match="epochs is 0"):
        benchmark(nn.Linear(3, 2), loader(), 0)
