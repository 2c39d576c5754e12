"""Hugging Face's Trainer with compressed gradients, on a rank."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from hasten.machine.environment import World
from hasten.parts.comm.gradient_compressor import GradientCompressor
from hasten.parts.data.collate import padded
from tiny import examples, tiny_model


def hugging_face(world: World) -> dict[str, Any]:
    # Accelerate asks for a place to meet even where the ranks have met already.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    model = tiny_model()
    compressor = GradientCompressor(sparsity_method="int4", communication_backend="gloo")

    class Compress(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **named: Any) -> None:
            compressor.attach(trainer.model_wrapped)

    def collate(given: Any) -> dict[str, Any]:
        batch = padded(given)
        return {**batch, "shift_labels": batch["labels"]}

    optimizer = AdamW(model.parameters(), lr=3e-3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=8,
                per_device_train_batch_size=4,
                ddp_backend="gloo",
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                use_cpu=True,
            ),
            data_collator=collate,
            train_dataset=examples(8, seed=1),
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
            callbacks=[Compress()],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    numbers = sum(p.numel() for p in model.parameters())
    return {
        "losses": losses,
        "weights": [float(flat.sum()), float(flat.abs().sum())],
        "steps": compressor.steps,
        "sent": compressor.sent_bytes,
        "predicted": compressor.predicted(model),
        "dense": 4 * numbers,
    }
