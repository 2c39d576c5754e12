"""TRL's SFTTrainer with packing: whole rows of documents, kept apart by their positions.

Rows are filled best-fit-decreasing, flattened, and attended document by document (padding-free),
as TRL does by default. A step has as many rows as 32 examples fill. Recomputation, on by default in
TRL, is off, since no other variant recomputes. The run ends after as many tokens as hasten's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from step.clock import Clock
from step.common import model_of, tokens_of
from step.given import IGNORED, Given
from step.hf_variant import StepTimes, arguments


def train(
    given: Given, clock: Clock, out: Path, own_order: bool = True, row_by_row: bool = False
) -> dict[str, Any]:
    """Train on examples that are tokenised already; TRL packs them.

    ``row_by_row`` passes a step's rows one at a time: the mask of a flattened row is dense, and
    grows with the square of its length.
    """
    disable_progress_bars()
    chosen = given.settings
    examples = given.all_records()
    data = Dataset.from_dict(
        {
            "input_ids": [r["input_ids"] for r in examples],
            "completion_mask": [[int(v != IGNORED) for v in r["labels"]] for r in examples],
        }
    )
    rows = max(1, round(chosen.batch * float(given.train.lengths.mean()) / chosen.longest))
    settings = {
        **arguments(given, out),
        "per_device_train_batch_size": 1 if row_by_row else rows,
        "gradient_accumulation_steps": rows if row_by_row else 1,
        "max_steps": 4 * len(given.steps),  # the token budget ends the run before
        "bf16": True,
        "packing": True,
        "max_length": chosen.longest,
        "completion_only_loss": True,
        "gradient_checkpointing": False,
    }
    clock.opened()
    model = model_of(given)
    counts: list[int] = []
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(given.model),
        callbacks=[StepTimes(clock, counts, given.budget())],
    )
    flatten = trainer.data_collator

    def collate(examples: list[Any]) -> Any:
        counts.append(tokens_of(examples))
        batch = flatten(examples)
        if batch["input_ids"].numel() != counts[-1]:
            raise RuntimeError(
                "TRL's batch holds padding; the variant counts on padding-free packing"
            )
        return batch

    trainer.data_collator = collate
    clock.started()
    trainer.train()
    model.save_pretrained(str(out / "model"))
    return {"saved": str(out / "model"), "settings": {"rows": rows, "length": chosen.longest}}
