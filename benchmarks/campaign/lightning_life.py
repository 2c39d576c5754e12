"""A run under Lightning, as its documentation does it: ``ModelCheckpoint``, ``ckpt_path="last"``.

Model, optimizer and interval are those of hasten's run, but without dropout, and an epoch is as
long as the interval: Lightning's checkpoint holds neither the random state nor a place in a plain
DataLoader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from campaign.peers import Hook, Peer, Records, alone, finite
from fault_kit import EVERY, Tell, build


class Module(lightning.LightningModule):
    """The kit's model and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = build()
        for module in self.inner.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.last = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.inner(batch["x"]), batch["y"])
        self.last = loss.item()
        return loss


class Telling(Callback):
    """Tells steps and saves; checkpoint callbacks come last, so that a save lies between two."""

    def __init__(self, tell: Tell, hook: Hook) -> None:
        self.tell, self.hook, self.saving = tell, hook, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.tell(f"R {trainer.global_step}")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._saved()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        step = trainer.global_step
        self.tell(f"L {step} {module.last.hex()}")
        if step % EVERY == 0:
            self.saving = step
            self.hook.before(step)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._saved()

    def _saved(self) -> None:
        if self.saving:
            self.tell(f"C {self.saving}")
            self.hook.after(self.saving)
            self.saving = 0


def train(folder: Path, steps: int, tell: Tell, hook: Hook, poison: int | None) -> None:
    torch.set_num_threads(1)
    keeping = ModelCheckpoint(
        dirpath=folder,
        every_n_train_steps=EVERY,
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=True,
    )
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Telling(tell, hook), keeping],
    )
    module = Module()
    loader = DataLoader(Records(poison, EVERY), batch_size=1, collate_fn=alone)
    trainer.fit(module, loader, ckpt_path="last")
    tell(f"W {int(finite(module))}")


def newest(folder: Path) -> list[Path]:
    """The file that ``last`` means."""
    return [folder / "last.ckpt"]


TRAINER = Peer(train, newest)
