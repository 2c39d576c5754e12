"""``TrainingArguments`` of Hugging Face's Trainer (and TRL's SFTConfig), as JSON or YAML."""

from __future__ import annotations

from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    TRAINING,
    Handler,
    RecipeDraft,
    batch,
    defaults,
    drafted,
    implied,
    later,
    packing,
    table,
)

NAME = "TrainingArguments"
MARKS = ("per_device_train_batch_size", "num_train_epochs", "output_dir", "lr_scheduler_type")


def draft_of(given: dict[str, Any], ranks: int) -> RecipeDraft:
    """Keys that stand at their default in a dump of all are said nothing about."""

    def finish(draft: RecipeDraft) -> None:
        defaults(draft)
        batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", ranks)

    return drafted(given, KEYS, finish, quiet=(None, False, "", [], {}))


KEYS: dict[str, Handler] = (
    TRAINING
    | table("training_arguments")
    | {
        "per_device_train_batch_size": later,
        "gradient_accumulation_steps": later,
        "packing": packing,
        "padding_free": packing,
        "use_peft": implied("finetuning_type", "lora"),
        "fsdp": sharding.words,
        "fsdp_config": sharding.config(lambda given: bool(given.get("fsdp"))),
    }
)
