"""LLaMA-Factory's YAML for supervised and continued training (its ``examples/train_*``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.recipe.importers.draft import (
    TRAINING,
    Handler,
    RecipeDraft,
    batch,
    defaults,
    drafted,
    later,
    packing,
    saves,
    share_or_count,
    table,
)

NAME = "LLaMA-Factory"
MARKS = ("stage", "finetuning_type", "model_name_or_path", "template", "cutoff_len", "dataset_dir")
TEMPLATES = {"deepseek": "deepseek-llm", "deepseek3": "deepseek-v3", "deepseekr1": "deepseek-r1"}


def draft_of(given: dict[str, Any], ranks: int) -> RecipeDraft:
    def finish(draft: RecipeDraft) -> None:
        defaults(draft)
        batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", ranks)
        if given.get("finetuning_type", "lora") == "lora":
            draft.values.setdefault("finetuning_type", "lora")
            draft.values.setdefault("lora_rank", 8)  # its defaults
            draft.values.setdefault("lora_alpha", 2 * draft.values["lora_rank"])

    return drafted(given, KEYS, finish)


def stage(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in ("sft", "pt"):
        draft.note(key, "mapped", "records with a loss mask, or text")
    else:
        words = f"hasten train has no stage {value!r}; its techniques work in TRL's trainers"
        draft.note(key, "unmapped", words)


def what_learns(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in ("lora", "full"):
        draft.say(key, "finetuning_type", value)
    else:
        draft.note(key, "unmapped", f"there is no {value!r} here: full or lora")


def targets(draft: RecipeDraft, key: str, value: Any) -> None:
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or [])
    draft.say(key, "lora_targets", "all-linear" if names == ["all"] else names)


def datasets(draft: RecipeDraft, key: str, value: Any) -> None:
    """Names stand in dataset_info.json; a name that is a file is one."""
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or [])
    info = Path(str(draft.given.get("dataset_dir") or "data")) / "dataset_info.json"
    found = [n if Path(n).suffix else f"{info}:{n}" for n in names]
    draft.say(key, "dataset", found[0] if len(found) == 1 else found)


def template(draft: RecipeDraft, key: str, value: Any) -> None:
    known = TEMPLATES.get(str(value))
    if known is None:
        draft.note(key, "mapped", "chat_template: auto, the tokenizer's own, or a near one")
    else:
        draft.say(key, "chat_template", known)


def quantised(draft: RecipeDraft, key: str, value: Any) -> None:
    base = {4: "nf4", 8: "int8"}.get(int(value or 0))
    if base is None:
        draft.note(key, "unmapped", "a frozen base has 4 or 8 bits")
    else:
        draft.say(key, "lora_base", base)


def workers(draft: RecipeDraft, key: str, value: Any) -> None:
    if value:
        draft.say(key, "data_workers", int(value))


KEYS: dict[str, Handler] = (
    TRAINING
    | table("llama_factory")
    | {
        "stage": stage,
        "finetuning_type": what_learns,
        "lora_target": targets,
        "quantization_bit": quantised,
        "dataset": datasets,
        "template": template,
        "preprocessing_num_workers": workers,
        "packing": packing,
        "neat_packing": packing,
        "val_size": share_or_count,
        "per_device_train_batch_size": later,
        "gradient_accumulation_steps": later,
        "save_steps": saves,
    }
)
