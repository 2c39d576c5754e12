"""Transformers' Trainer as a variant: its own loop, collation by padding, bf16 autocast, fused
AdamW.

With Liger's kernels in its model, where asked.

It gets the same examples, the same number of them in a step, and the settings that its
documentation advises for speed (bf16, fused optimizer, pinned memory); the model is given in
float32, as its masters. A turn is a call of ``train``; its clock runs from the loop's beginning to
its end, so that building the Trainer costs it nothing.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpu.rows import Row
from gpu.work import Work
from hasten.parts.data.collate import TokenizedExample


def missing(liger: bool = False) -> str:
    """Why the Trainer can't run here; empty when it can."""
    if importlib.util.find_spec("accelerate") is None:
        return "accelerate isn't installed, which the Trainer needs"
    if liger and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel isn't installed"
    return ""


def padded(examples: Sequence[TokenizedExample]) -> dict[str, Tensor]:
    """Rows filled up to the longest, filler without a label; the model shifts labels itself."""
    longest = max(r.length for r in examples)
    shape = (len(examples), longest)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    for row, example in enumerate(examples):
        found = torch.from_numpy(example.input_ids).long()
        ids[row, : example.length], mask[row, : example.length] = found, 1
        labels[row, : example.length] = found
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class TrainerVariant:
    """``steps`` runs the Trainer for so many; its model and data go on, its optimizer is kept."""

    def __init__(
        self, row: Row, model: nn.Module, examples: Sequence[TokenizedExample], liger: bool = False
    ) -> None:
        self.row, self.model, self.examples = row, model, examples
        self.liger = liger
        self.at = 0
        self._folder = tempfile.TemporaryDirectory()
        self._optimizer: Any = None

    def steps(self, count: int) -> Work:
        from transformers import PrinterCallback, Trainer, TrainingArguments

        size = self.row.batch
        chosen = [
            self.examples[i % len(self.examples)] for i in range(self.at, self.at + count * size)
        ]
        self.at += count * size
        given: Any = TrainingArguments(
            output_dir=self._folder.name,
            max_steps=count,
            per_device_train_batch_size=size,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            bf16=True,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.accelerator.is_available(),
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            use_liger_kernel=self.liger,
        )
        trainer = Trainer(
            model=self.model,
            args=given,
            train_dataset=chosen,
            data_collator=padded,
            optimizers=(self._optimizer, None),
        )
        trainer.remove_callback(PrinterCallback)
        watch = clock_class()()
        trainer.add_callback(watch)
        trainer.train()
        # The next turn's Trainer wraps the optimizer again. The model stays wrapped, and marked so:
        # taken out of its autocast it would be trained in float32 from then on.
        self._optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        lengths = [r.length for r in chosen]
        return Work(sum(lengths), sum(n * n for n in lengths), watch.seconds)


def clock_class() -> Any:
    """The clock of a loop, made once transformers is wanted."""
    from transformers import TrainerCallback

    class LoopClock(TrainerCallback):
        seconds = 0.0

        def on_train_begin(self, *given: Any, **more: Any) -> None:
            _wait()
            self.began = time.perf_counter()

        def on_train_end(self, *given: Any, **more: Any) -> None:
            _wait()
            self.seconds = time.perf_counter() - self.began

    return LoopClock


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
