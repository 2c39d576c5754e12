"""What OptimizedTrainer shows of its epochs, and that it costs no wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hasten import OptimizedTrainer
from host_waits import HostWaits


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def train(loader: Any = None, loss: Any = F.cross_entropy, **settings: Any) -> dict[str, Any]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=4) if loader is None else loader
    return OptimizedTrainer(model, optimizer, loss, **settings).train(loader, epochs=3)


@pytest.mark.parametrize("settings", [{}, {"accum_steps": 4}, {"dynamic_batch": True}], ids=str)
def test_elsewhere_than_on_a_terminal_lines_are_plain(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(**settings)
    first, last = capsys.readouterr().err.splitlines()  # the first state, none for ten seconds
    assert "epoch 1 of 3, step 1: loss " in first
    assert last.startswith("epoch 3 of 3, step ")
    assert f": loss {summary['epoch_losses'][2]:.4f}, " in last


def test_a_terminal_has_a_bar_that_no_thread_draws(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    threads = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        threads.append(threading.active_count())
        return F.cross_entropy(output, target)

    before = threading.active_count()
    train(loss=loss)
    assert set(threads) == {before}, "a forked worker of a loader could inherit its lock"
    err = capsys.readouterr().err
    assert "━" in err
    assert "epoch 3 of 3, step 6: loss" in err


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_loader_without_a_length_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    train(DataLoader(Stream(), batch_size=4))
    first = capsys.readouterr().err.splitlines()[0]
    assert first.split("loss")[0] == "  0%  epoch 1 of 3, step 1: "


def test_what_is_shown_makes_the_host_wait_no_more() -> None:
    """Batches that lie on the device, read there in every step."""
    waits = []
    for shown in (False, True):
        batches = [tuple(t.clone() for t in batch) for batch in DataLoader(data(), batch_size=4)]
        with HostWaits([t for batch in batches for t in batch]) as found:
            train(batches, progress=shown)
        waits.append(sorted(found.places))
    assert waits[0] == waits[1]
    assert len(waits[0]) >= 18, "each step reads its norm"
