"""What a Lightning module may do besides returning its loss: with `speed_up` it does the same."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hasten
from integrations.test_techniques_in_lightning import adamw, loader, trainer_of
from integrations.test_trainer_options import model_of
from technique_counts import counted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs lightning"
)
KINDS = (
    *("plain", "one argument", "hook that masks", "hook that reads", "row metric", "counters"),
    *("manual", "list", "schedule"),
)


class Meter:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.count = 0


def module_of(kind: str) -> Any:  # noqa: C901  # a class within: its methods count
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.shapes = model_of("llama"), [], []
            self.meter, self.seen = Meter(), torch.nn.Module()
            self.seen.register_buffer("steps", torch.zeros(()))
            self.automatic_optimization = kind != "manual"

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.model)
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
            return {
                "list": [optimizer],
                "schedule": {"optimizer": optimizer, "lr_scheduler": rate},
            }.get(kind, optimizer)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss, on_step=False, on_epoch=True)
            if kind == "row metric" or (kind == "row metric of rank 1" and self.global_rank):
                rows = (batch["labels"] != -100).float().mean(1)
                self.log("rows", rows.square().mean(), on_step=False, on_epoch=True)
            if kind == "counters":
                self.meter.count += 1
                self.steps = (*getattr(self, "steps", ()), index)
                self.seen.steps += 1
            if kind == "manual":
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
            if kind == "hook that masks":
                labels = batch["labels"].clone()
                labels[:, :6] = -100
                batch = {**batch, "labels": labels}
            return batch

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if kind == "hook that reads":
                self.shapes.append(tuple(batch["input_ids"].shape))

    class OneArgument(Module):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return super().training_step(batch, 0)

    return OneArgument() if kind == "one argument" else Module()


def trained(kind: str, folder: Any, speed_up: bool, **more: Any) -> dict[str, Any]:
    trainer, module = trainer_of(folder, **more), module_of(kind)
    if speed_up:
        hasten.speed_up(trainer)
    with counted() as counts:
        trainer.fit(module, loader(5))  # the last batch of an epoch is smaller
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return {
        "weights": weights,
        "losses": module.losses,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "shapes": module.shapes,
        "counts": (module.meter.count, float(module.seen.steps), getattr(module, "steps", ())),
        "effective": counts.effective(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_does_the_same_with_techniques(
    kind: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(kind, tmp_path / "plain", speed_up=False)
    with caplog.at_level(logging.WARNING, "hasten"):
        found = trained(kind, tmp_path / "found", speed_up=True)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert torch.allclose(found["weights"], plain["weights"], atol=2e-3)
    assert found["metrics"] == pytest.approx(plain["metrics"], rel=1e-3)
    assert found["shapes"] == plain["shapes"]
    assert found["counts"] == plain["counts"]
    assert ("packed" in found["effective"]) == (kind != "manual")
    words: Sequence[str] = {
        "manual": ["packed: Module has automatic_optimization = False"],
        "schedule": ["fused_adamw is left out: configure_optimizers returns more than"],
    }.get(kind, [])
    assert all(text in caplog.text for text in words)
