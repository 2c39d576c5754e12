"""axolotl's YAML for full and adapter training of causal language models."""

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
    epochs,
    implied,
    later,
    named,
    recompute,
    schedule,
    share_or_count,
    table,
)

NAME = "axolotl"
MARKS = ("base_model", "sequence_len", "micro_batch_size", "sample_packing", "adapter", "datasets")
SHAPES = (
    *("alpaca", "chat_template", "completion", "sharegpt", "input_output", "pretrain"),
    *("alpaca_chat.load_qa", "gpteacher", "oasst", "chat_template.default"),
)


def draft_of(given: dict[str, Any], ranks: int) -> RecipeDraft:
    def finish(draft: RecipeDraft) -> None:
        defaults(draft)
        batch(draft, "micro_batch_size", "gradient_accumulation_steps", ranks)
        if draft.values.setdefault("finetuning_type", "full") == "full":
            for name in [name for name in draft.values if name.startswith("lora_")]:
                del draft.values[name]
                draft.note(draft.why[name], "needless", "no adapter is asked for")

    return drafted(given, KEYS, finish)


def adapter(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in ("lora", "qlora"):
        draft.say(key, "finetuning_type", "lora")
    elif value:
        draft.note(key, "unmapped", f"there is no adapter {value!r}; lora takes its place")
        draft.values["finetuning_type"] = "lora"


def datasets(draft: RecipeDraft, key: str, value: Any) -> None:
    """Paths and hub names; the shape of their records is recognised, not told."""
    sources = [s for s in value or [] if isinstance(s, dict)]
    found: list[Any] = []
    for source in sources:
        files = source.get("data_files") or source.get("path")
        found += files if isinstance(files, list) else [files]
        kind = source.get("type")
        if isinstance(kind, dict) or (isinstance(kind, str) and kind.split(":")[0] not in SHAPES):
            words = "columns of your own: name them under `columns`"
            draft.note(key, "unmapped", f"type {str(kind)[:40]}: {words}")
        if source.get("field_messages") not in (None, "messages", "conversations"):
            draft.values["columns"] = {"messages": str(source["field_messages"])}
        if source.get("split") not in (None, "train"):
            draft.note(key, "unmapped", f"split {source['split']!r}: the training split is read")
    known = [str(one) for one in found if one]
    if known:
        draft.say(key, "dataset", known[0] if len(known) == 1 else known)


def targets(value: Any) -> str | list[str]:
    """A list of names, or one text: ``all-linear`` or a regular expression."""
    return value if isinstance(value, str) else list(value)


def packing(draft: RecipeDraft, key: str, value: Any) -> None:
    """Rows of ``sequence_len`` out of the whole epoch, documents kept apart."""
    if not value:
        return
    row = draft.given.get("sequence_len")
    draft.use(key, "packed_epoch", {"row_tokens": int(row)} if row else None)
    draft.plan.append("document_attention")


def everything(draft: RecipeDraft, key: str, value: Any) -> None:
    words = "loss is on the assistant's tokens; of text records on all"
    draft.note(key, "unmapped" if value else "needless", words)


KEYS: dict[str, Handler] = (
    TRAINING
    | table("axolotl")
    | {
        "load_in_8bit": implied("lora_base", "int8"),
        "load_in_4bit": implied("lora_base", "nf4"),
        "datasets": datasets,
        "val_set_size": share_or_count,
        "adapter": adapter,
        "lora_target_modules": named("lora_targets", targets),
        "lora_target_linear": implied("lora_targets", "all-linear"),
        "sample_packing": packing,
        "micro_batch_size": later,
        "gradient_accumulation_steps": later,
        "num_epochs": epochs,
        "lr_scheduler": schedule,
        "optimizer": TRAINING["optim"],
        "train_on_inputs": everything,
        "gradient_checkpointing": recompute,
        "wandb_project": implied("log_to", ["wandb"]),
        "mlflow_tracking_uri": implied("log_to", ["mlflow"]),
        "use_tensorboard": implied("log_to", ["tensorboard"]),
        "fsdp": sharding.words,
        "fsdp_config": sharding.config(lambda given: True),
    }
)
