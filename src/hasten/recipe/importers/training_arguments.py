"""``TrainingArguments`` of Hugging Face's Trainer (and TRL's SFTConfig), as JSON or YAML."""

from __future__ import annotations

from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    TRAINING,
    Draft,
    Handler,
    batch,
    defaults,
    drafted,
    named,
    needless,
    switch,
    unmapped,
)

NAME = "TrainingArguments"
MARKS = ("per_device_train_batch_size", "num_train_epochs", "output_dir", "lr_scheduler_type")


def draft_of(given: dict[str, Any], ranks: int) -> Draft:
    """Keys that stand at their default in a dump of all are said nothing about."""

    def finish(draft: Draft) -> None:
        defaults(draft)
        batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", ranks)

    return drafted(given, KEYS, finish, quiet=(None, False, "", [], {}))


def packing(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.use(key, "packed")
        if "document_attention" not in draft.plan:
            draft.plan.append("document_attention")
    else:
        draft.note(key, "needless", "it is off")


KEYS: dict[str, Handler] = TRAINING | {
    "model_name_or_path": named("model"),
    "dataset_name": named("dataset"),
    "per_device_train_batch_size": lambda draft, key, value: None,  # in batch()
    "gradient_accumulation_steps": lambda draft, key, value: None,
    "max_length": named("cutoff_len"),
    "max_seq_length": named("cutoff_len"),
    "packing": packing,
    "padding_free": packing,
    "assistant_only_loss": needless("loss is on the assistant's tokens"),
    "completion_only_loss": needless("loss is on the completion"),
    "use_peft": lambda d, k, v: d.say(k, "finetuning_type", "lora") if v else None,
    "lora_r": named("lora_rank", int),
    "lora_alpha": named("lora_alpha", int),
    "lora_dropout": named("lora_dropout", float),
    "lora_target_modules": named("lora_targets"),
    "fsdp": sharding.words,
    "fsdp_config": sharding.config(lambda given: bool(given.get("fsdp"))),
    "bf16_full_eval": needless("evaluation has the format of training"),
    "torch_compile": switch("compiled"),
    "optim_args": unmapped("the optimizer has no further arguments"),
}
