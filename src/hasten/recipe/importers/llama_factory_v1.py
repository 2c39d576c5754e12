"""LLaMA-Factory's v1 format: flat keys, and ``*_config`` mappings with a ``name``.

Meanings and defaults are from LLaMA-Factory's ``v1/config/*_args.py``,
``v1/core/base_trainer.py`` and ``v1/plugins``. Its data sets are in a separate YAML
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.errors import InputError
from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    Handler,
    RecipeDraft,
    drafted,
    is_off,
    switch,
    table,
    whole_number,
)
from hasten.recipe.importers.training import (
    TRAINING,
    batch,
    deepspeed,
    examples_kept,
    found_file,
    half,
    lora_targets,
    packed_rows,
    quantised,
    resolve_batch,
    schedule,
)
from hasten.recipe.yaml_reader import read_yaml_file

NAME = "LLaMA-Factory v1"
MARKS = (
    *(
        "model_class",
        "train_dataset",
        "peft_config",
        "dist_config",
        "kernel_config",
        "quant_config",
    ),
    *("batching_strategy", "init_config", "optim_config", "sample_backend", "lr_scheduler_config"),
)
CUTOFF = 2048  # tokens
TOOL_DEFAULTS = {
    "adam_beta1|adam_beta2": 0.9,
    "num_train_epochs|max_steps": 3,
    "learning_rate": 1e-4,
    "lr_scheduler_config": {"name": "constant"},  # without a plugin, the rate is constant
    "seed": 42,
    "cutoff_len": CUTOFF,
    "bf16": True,
    "enable_activation_checkpointing": True,
}


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    def finish(draft: RecipeDraft) -> None:
        each, total = (
            whole_number(draft.setting("micro_batch_size", 1)),
            draft.source.get("global_batch_size"),
        )
        size = whole_number(draft.source.get("cp_size") or 1)
        passes = max(whole_number(total) * size // (each * ranks), 1) if total else 1
        batching(draft)
        batch(draft, ("micro_batch_size", 1), ("passes", passes), max(ranks // size, 1))
        if total:
            draft.note("global_batch_size", "mapped", "examples of a step over all ranks")
        resolve_batch(draft)
        draft.values.setdefault("finetuning_type", "full")
        if draft.source.get("optim_config") is None:  # torch's AdamW without arguments
            draft.values["weight_decay"], draft.why["weight_decay"] = 0.01, "torch.optim.AdamW"
            explanation = "0.01, torch's default there, norms and biases too; matrices alone here"
            draft.row("weight_decay", 0.01, "unmapped", explanation)

    return drafted(draft, KEYS, finish, defaults=TOOL_DEFAULTS)


def batching(draft: RecipeDraft) -> None:
    """Maps the strategy: padded examples, one row, or as many examples as fit into a row."""
    key, strategy = "batching_strategy", str(draft.source.get("batching_strategy") or "normal")
    if strategy == "padding_free":
        examples_kept(draft, key, True)
    elif strategy.startswith("dynamic"):
        packed_rows(draft, key, whole_number(draft.setting("cutoff_len", CUTOFF)))
        if strategy == "dynamic_batching":
            draft.note(key, "unmapped", "padding counts as tokens there; rows have none here")
    elif strategy != "normal":
        draft.note(key, "unmapped", "there is no such way of batching")


def adapter(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps LoRA; files with another adapter have been refused."""
    if not setting:
        return
    settings = dict(setting)
    if settings.pop("name", "lora") != "lora":
        return
    draft.say(key, "finetuning_type", "lora")
    draft.say(key, "lora_rank", whole_number(settings.pop("r", 8)))
    draft.say(key, "lora_alpha", whole_number(settings.pop("lora_alpha", 16)))
    draft.say(key, "lora_dropout", float(settings.pop("lora_dropout", 0.05)))
    lora_targets("all")(draft, key, settings.pop("target_modules", "all"))
    draft.say(key, "lora_rslora", bool(settings.pop("use_rslora", False)))
    draft.say(key, "lora_dora", bool(settings.pop("use_dora", False)))
    other_settings(draft, key, settings)


def other_settings(draft: RecipeDraft, key: str, settings: Mapping[str, Any]) -> None:
    """Adds a row for each unsupported setting."""
    for name, part_setting in settings.items():
        if not is_off(part_setting):
            draft.row(f"{key}.{name}", part_setting, "unmapped", "hasten has no such setting")


def layout(draft: RecipeDraft, key: str, setting: Any) -> None:
    settings = dict(setting or {})
    name = settings.pop("name", None)
    if name == "fsdp2":
        draft.say(key, "layout", "fsdp2")
        sharding.config(lambda source: True)(draft, key, settings)
    elif name == "deepspeed":
        deepspeed(draft, key, settings.pop("config_file", None))
        other_settings(draft, key, settings)
    elif name is not None:
        draft.note(key, "unmapped", f"there is no layout {name!r}: set layout in the recipe")


def kernels(draft: RecipeDraft, key: str, setting: Any) -> None:
    name = dict(setting or {}).get("name")
    if name == "liger_kernel":
        draft.use(key, "fused_layers")
    elif name is not None:
        draft.note(key, "needless", "the plan chooses kernels")


def quantised_base(draft: RecipeDraft, key: str, setting: Any) -> None:
    settings = dict(setting or {})
    quantised(draft, key, settings.get("quantization_bit") or settings)


def optimizer(draft: RecipeDraft, key: str, setting: Any) -> None:
    settings = dict(setting or {})
    name = str(settings.pop("name", "adamw"))
    settings.pop("lr", None)  # learning_rate is used instead, as there
    TRAINING["optim"](draft, key, name)
    decay = settings.pop("weight_decay", settings.pop("wd", None))
    if decay is not None:
        draft.say(key, "weight_decay", float(decay))
    betas = settings.pop("betas", settings.pop("adamw_betas", None))
    if betas is not None:
        draft.values["adam_betas"] = [float(b) for b in betas]
        draft.why["adam_betas"] = key
    other_settings(
        draft, key, {k: v for k, v in settings.items() if not (k.endswith("eps") and v == 1e-8)}
    )


def scheduler(draft: RecipeDraft, key: str, setting: Any) -> None:
    settings = dict(setting or {})
    schedule(draft, key, settings.pop("name", None))
    steps = settings.pop(
        "warmup_steps", settings.pop("num_warmup_steps", settings.pop("warmup_ratio", None))
    )
    if steps:
        TRAINING["warmup_steps"](draft, key, steps)
    other_settings(draft, key, settings)


def datasets(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a YAML list of data sets, or one data file.

    Raises:
        InputError: the list has pairs of preferences.
    """
    if not isinstance(setting, str) or not setting:
        return
    if not setting.endswith((".yaml", ".yml")):
        draft.say(key, "dataset", setting)
        return
    path = found_file(setting, draft.folder)
    if path is None:
        explanation = f"there is no file {setting} here or above: name the files of its examples"
        draft.note(key, "unmapped", explanation)
        return
    listing = read_yaml_file(path, "list of data sets")
    sources: list[Any] = []
    for name, entry in (listing if isinstance(listing, dict) else {}).items():
        fields = dict(entry or {})
        if fields.get("converter") in ("pair", "dpo"):
            raise InputError(
                f"{path}: {name} has pairs of preferences, and the file has no stage for them; "
                "write a recipe with stage: dpo, so nothing was written"
            )
        location = str(fields.pop("path", name))
        source: dict[str, Any] = {"path": str(found_file(location, draft.folder) or location)}
        size, weight = fields.pop("size", None), fields.pop("weight", None)
        source |= {"max_examples": whole_number(size)} if size else {}
        source |= {"weight": float(weight)} if weight else {}
        if size or weight:
            draft.row(f"{key}.{name}", size or weight, "unmapped", "it is drawn with repeats there")
        split = fields.pop("split", "train")
        if fields.pop("source", "hf_hub") == "hf_hub" and split not in ("train", None):
            source["path"] += f":{split}"
        fields.pop("converter", None)
        other_settings(draft, f"{key}.{name}", fields)
        sources.append(source if len(source) > 1 else source["path"])
    draft.say(key, "dataset", sources)


KEYS: dict[str, Handler] = table("llama_factory_v1") | {
    **{key: TRAINING[key] for key in ("num_train_epochs", "max_steps", "max_grad_norm")},
    **{key: TRAINING[key] for key in ("save_steps", "resume_from_checkpoint", "adam_beta1")},
    "train_dataset": datasets,
    "bf16": half("bf16"),
    "peft_config": adapter,
    "dist_config": layout,
    "kernel_config": kernels,
    "quant_config": quantised_base,
    "optim_config": optimizer,
    "lr_scheduler_config": scheduler,
    "enable_activation_checkpointing": switch("activation_checkpointing", on=(True,)),
}
