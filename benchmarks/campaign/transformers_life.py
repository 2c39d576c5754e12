"""A run under Hugging Face's Trainer as its examples do it: save_steps, get_last_checkpoint.

Model, records, optimizer and interval are those of hasten's run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from campaign.peers import Hook, Peer, Records, alone, finite
from fault_kit import EVERY, Tell, build


class Net(nn.Module):
    """The kit's model with the loss inside, which the Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = build()
        self.last = 0.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.inner(x), y)
        self.last = loss.item()
        return {"loss": loss}


class Telling(TrainerCallback):
    """Tells steps and saves, and lets a hook act around the latter."""

    def __init__(self, tell: Tell, hook: Hook) -> None:
        self.tell, self.hook = tell, hook

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.tell(f"R {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.tell(f"L {state.global_step} {given['model'].last.hex()}")
        if control.should_save:
            self.hook.before(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.tell(f"C {state.global_step}")
        self.hook.after(state.global_step)


def train(folder: Path, steps: int, tell: Tell, hook: Hook, poison: int | None) -> None:
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        weight_decay=0.01,  # torch's default, which hasten's run has
        lr_scheduler_type="constant",  # else it depends on max_steps
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        Net(),
        arguments,
        train_dataset=Records(poison),
        data_collator=alone,
        callbacks=[Telling(tell, hook)],
    )
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    tell(f"W {int(finite(trainer.model))}")


def newest(folder: Path) -> list[Path]:
    """The files of the newest checkpoint."""
    return sorted(p for p in Path(get_last_checkpoint(str(folder))).iterdir() if p.is_file())


TRAINER = Peer(train, newest)
