"""What OptimizedTrainer shows of its epochs, how often, and that it costs no wait."""

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
from hasten.core.timing import StepMetrics
from hasten.integrations import optimized_trainer
from hasten.integrations.optimized_trainer import EpochProgress
from host_waits import HostWaits


class Noted:
    """What would be shown, and the share that is done."""

    def __init__(self) -> None:
        self.lines, self.states = list[str](), list[tuple[str, float]]()

    def tell(self, text: str) -> None:
        self.lines.append(text)

    def begin(self) -> None: ...

    def show(self, text: str, share: float) -> None:
        self.states.append((text, share))


def step(epoch: int, loss: float) -> StepMetrics:
    """A step of four examples in half a second."""
    counts = {"tokens": 4, "trained_tokens": 4, "positions": 4, "examples": 4}
    rest: dict[str, Any] = {"tokens_per_second": 8.0, "padding_share": 0.0, "peak_memory_bytes": 0}
    return StepMetrics(
        step=1,
        epoch=epoch,
        loss=loss,
        learning_rate=0.1,
        grad_norm=1.0,
        step_seconds=0.5,
        model_flops=None,
        mfu=None,
        **counts,
        **rest,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass as the test says."""
    now = [100.0]
    monkeypatch.setattr(optimized_trainer.time, "monotonic", lambda: now[0])
    return now


def test_a_state_has_the_epoch_s_loss_and_speed_and_the_share_of_all(clock: list[float]) -> None:
    noted = Noted()
    progress = EpochProgress(noted, epochs=2, steps=2)
    for epoch, number, loss, count in [(0, 1, 1.0, 3), (0, 2, 2.0, 1), (1, 1, 5.0, 8)]:
        clock[0] += 2
        progress.after_step(step(epoch, loss), count, number)
    progress.finish()
    assert noted.states == [
        ("epoch 1 of 2, step 1 of 2: loss 1.0000, 8 examples/s", 0.25),
        ("epoch 1 of 2, step 2 of 2: loss 1.2500, 8 examples/s", 0.5),
        ("epoch 2 of 2, step 1 of 2: loss 5.0000, 8 examples/s", 0.75),
    ]
    assert noted.lines == [
        "epoch 1 of 2: loss 1.2500, 8 examples/s",
        "epoch 2 of 2: loss 5.0000, 8 examples/s",
    ]
    assert progress.losses == {0: 1.25, 1: 5.0}


def test_short_steps_and_epochs_are_shown_at_intervals(clock: list[float]) -> None:
    noted = Noted()
    progress = EpochProgress(noted, epochs=1000, steps=1)
    for epoch in range(1000):
        clock[0] += 0.01
        progress.after_step(step(epoch, 1.0), 4, 1)
    progress.finish()
    assert 90 <= len(noted.states) <= 101
    assert 9 <= len(noted.lines) <= 11
    assert noted.lines[-1].startswith("epoch 1000 of 1000: ")


def test_without_a_length_the_first_epoch_tells_how_long_the_others_are(
    clock: list[float],
) -> None:
    noted = Noted()
    progress = EpochProgress(noted, epochs=2, steps=None)
    for epoch, number in [(0, 1), (0, 2), (0, 3), (1, 1)]:
        clock[0] += 2
        progress.after_step(step(epoch, 1.0), 4, number)
    assert [state[0].partition(":")[0] for state in noted.states] == [
        *(f"epoch 1 of 2, step {number}" for number in (1, 2, 3)),
        "epoch 2 of 2, step 1 of 3",
    ]
    assert [share for _, share in noted.states] == [0, 0, 0, pytest.approx(2 / 3)]


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


@pytest.fixture
def at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOWN_EVERY_SECONDS", "LINE_EVERY_SECONDS"):
        monkeypatch.setattr(optimized_trainer, name, 0.0)


@pytest.mark.usefixtures("at_each_step")
@pytest.mark.parametrize("settings", [{}, {"accum_steps": 4}, {"dynamic_batch": True}], ids=str)
def test_elsewhere_than_on_a_terminal_lines_are_plain(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(**settings)
    lines = capsys.readouterr().err.splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.partition(" examples/s")[0].rpartition(", ")[0] for line in epochs] == [
        f"epoch {epoch + 1} of 3: loss {loss:.4f}"
        for epoch, loss in summary["epoch_losses"].items()
    ]
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 4  # the first state, then none for ten seconds


@pytest.mark.usefixtures("at_each_step")
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
    assert "epoch 3 of 3: loss" in err


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("at_each_step")
def test_a_loader_without_a_length_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    train(DataLoader(Stream(), batch_size=4))
    first = capsys.readouterr().err.splitlines()[0]
    assert first.split("loss")[0] == "  0%  epoch 1 of 3, step 1: "


@pytest.mark.usefixtures("at_each_step")
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
