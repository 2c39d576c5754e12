"""SmartCheckpointer in the Hugging Face Trainer and in Lightning: one call where a step ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hasten import SmartCheckpointer

ROWS = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i))} for i in range(24)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


class Saving(TrainerCallback):
    """What the card tells a reader to write."""

    def __init__(self, checkpointer: SmartCheckpointer) -> None:
        self.checkpointer = checkpointer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.protect(
            model=given["model"], optimizer=given["optimizer"], schedule=given["lr_scheduler"]
        )
        self.checkpointer.restore()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.after_step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.checkpointer.close()


def test_the_trainer_saves_and_a_fresh_one_has_weights_moments_and_schedule(
    tmp_path: Path,
) -> None:
    def trainer(steps: int) -> tuple[Trainer, SmartCheckpointer]:
        keeper = SmartCheckpointer(interval=2, folder=tmp_path / "saved")
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        found = Trainer(Model(), arguments, train_dataset=ROWS, callbacks=[Saving(keeper)])
        return found, keeper

    first, keeper = trainer(6)
    first.train()
    assert [p.name[-1] for p in keeper.list()] == ["2", "4", "6"]
    trained: Any = first.model
    second, again = trainer(6)
    begun: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            begun.setdefault("weight", given["model"].linear.weight.detach().clone())
            moments = given["optimizer"].state_dict()["state"]
            begun.setdefault("steps", float(moments[0]["step"]))
            begun.setdefault("rate", given["lr_scheduler"].last_epoch)

    second.add_callback(Look())
    second.train()
    assert again.interval.failures == 1
    assert torch.equal(begun["weight"], trained.linear.weight)
    assert begun["steps"] == 6
    assert begun["rate"] == 6


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning_saves_where_a_batch_ends(tmp_path: Path) -> None:
    lightning: Any = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.keeper = SmartCheckpointer(interval=2, folder=tmp_path)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(batch[0])["loss"]

        def on_train_start(self) -> None:
            self.keeper.protect(model=self.model, optimizer=self.trainer.optimizers[0]).restore()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.keeper.after_step(self.trainer.global_step)

        def on_train_end(self) -> None:
            self.keeper.close()

    module = Module()
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data)
    assert [p.name[-1] for p in module.keeper.list()] == ["2", "4", "6"]
