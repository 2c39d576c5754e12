"""The token-budget batch sampler in other people's loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hasten.parts.data.collate import padded
from hasten.parts.data.dynamic_batch import DynamicBatchSampler
from tiny import examples, tiny_model

DATA = examples(30, seed=1)
BUDGET = 120


def collate(given: Any) -> dict[str, Any]:
    """Labels under the name that tells Transformers not to shift them once more."""
    batch = padded(given)
    return {**batch, "shift_labels": batch["labels"]}


class TokenBudgetTrainer(Trainer):
    """The Trainer takes a batch sampler through its own loader."""

    def get_train_dataloader(self) -> Any:
        sampler = DynamicBatchSampler(self.train_dataset, BUDGET, seed=4)
        loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)
        return self.accelerator.prepare(loader)


def test_the_trainer_sees_the_batches_of_each_epoch(tmp_path: Path) -> None:
    model = tiny_model()
    seen: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(sorted(kwargs["input_ids"].flatten().tolist()))

    model.register_forward_pre_hook(note, with_kwargs=True)
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    TokenBudgetTrainer(model=model, args=settings, train_dataset=DATA).train()
    sampler = DynamicBatchSampler(DATA, BUDGET, seed=4)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += [padded([DATA[i] for i in batch])["input_ids"] for batch in sampler]
    assert seen == [sorted(ids.flatten().tolist()) for ids in expected]


def test_lightning_trains_from_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.examples = tiny_model(), 0

        def training_step(self, batch: Any) -> Any:
            self.examples += len(batch["input_ids"])
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sampler = DynamicBatchSampler(DATA, BUDGET)
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    module = Module()
    lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", logger=False).fit(
        module, loader
    )
    assert module.examples == len(DATA)
