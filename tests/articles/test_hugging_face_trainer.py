"""Packing in the Hugging Face Trainer: the collator is all it takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

from hasten.parts.data.collate import TokenizedExample, packed, padded
from hasten.parts.nn.attention import use_document_attention
from hasten.parts.nn.losses import WholeLogitsLoss
from tiny import examples, tiny_model

DATA = examples(8, seed=1)
STEPS, RATE = 3, 0.5


def collate(given: Sequence[TokenizedExample]) -> dict[str, Any]:
    """Labels under the name that tells Transformers not to shift them once more."""
    batch = packed(given)
    return {**batch, "shift_labels": batch["labels"]}


def by_hand() -> dict[str, torch.Tensor]:
    """The same three steps over all examples, padded, in a plain loop."""
    model = tiny_model()
    loss, optimizer = WholeLogitsLoss(model), SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        total, count = loss(**padded(DATA))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_the_trainer_learns_from_packed_rows_what_a_loop_learns_from_padded_ones(
    documents: bool, accumulate: int, tmp_path: Path
) -> None:
    model = tiny_model()
    if documents:
        use_document_attention(model)
    optimizer = SGD(model.parameters(), lr=RATE)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=len(DATA) // accumulate,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=collate,
        train_dataset=DATA,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    expected = by_hand()
    start = dict(tiny_model().named_parameters())
    for name, weight in model.named_parameters():
        moved = (expected[name] - start[name]).norm()
        assert (weight - expected[name]).norm() < 1e-4 * moved, name
