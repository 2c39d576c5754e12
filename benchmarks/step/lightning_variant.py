"""Lightning with bf16-mixed precision: the Hugging Face model in a LightningModule.

Clipping stands in a hook: Lightning's own refuses a fused optimizer under mixed precision, and a
fused AdamW is the faster choice.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from step.clock import Clock
from step.common import adamw, model_of, padded
from step.given import Given


class Module(lightning.LightningModule):
    """The model, its loss as Transformers computes it, AdamW."""

    def __init__(self, given: Given, clock: Clock) -> None:
        super().__init__()
        self.given, self.clock = given, clock
        self.model = model_of(given)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.given, self.model)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        learns = [p for p in self.model.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(learns, self.given.settings.clip)

    def on_train_start(self) -> None:
        self.clock.started()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.clock.step(int(batch["attention_mask"].sum()))
        self.clock.losses.append(float(outputs["loss"]))


def train(given: Given, clock: Clock, out: Path) -> dict[str, Any]:
    """Train on hasten's steps in order, one batch per step."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loader = DataLoader(
        given.in_order(),  # a list is a map-style data set
        batch_size=given.settings.batch,
        collate_fn=padded,
    )
    clock.opened()
    module = Module(given, clock)
    trainer = lightning.Trainer(
        max_steps=len(given.steps),
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(out),
    )
    trainer.fit(module, loader)
    module.model.save_pretrained(str(out / "model"))
    return {"saved": str(out / "model")}
