"""ms-swift's YAML for training on answers or preferences (``swift sft``, ``pt``, ``rlhf``).

Meanings and defaults: ms-swift's ``arguments/sft_args.py``, ``arguments/base_args``,
``arguments/tuner_args.py``, ``trainers/arguments.py`` and ``megatron/arguments``.
"""

from __future__ import annotations

import math
from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    Handler,
    RecipeDraft,
    drafted,
    named,
    names_of,
    switch,
    table,
    whole_number,
)
from hasten.recipe.importers.preferences import KEYS as PREFERENCE_KEYS
from hasten.recipe.importers.preferences import is_preference_training, take_preferences
from hasten.recipe.importers.training import (
    DEFAULTS,
    TRAINING,
    batch,
    deepspeed,
    examples_kept,
    four_bits,
    half,
    lora_targets,
    packed_rows,
    quantised,
    resolve_batch,
    resolve_lora,
    say_sources,
    share_or_count,
    steps,
    warmup,
)

NAME = "ms-swift"
MARKS = (
    *("tuner_type", "train_type", "split_dataset_ratio", "dataset_num_proc", "rlhf_type"),
    *("target_modules", "torch_dtype", "padding_free", "model_author", "model_name", "use_hf"),
    *(
        "attn_impl",
        "val_dataset",
        "truncation_strategy",
        "loss_scale",
        "sampler_type",
        "infer_backend",
    ),
    *("lr_warmup_fraction", "tuner_backend", "quant_bits"),
)
TOOL_DEFAULTS = {
    "adam_beta1|adam_beta2": 0.9,
    "num_train_epochs|max_steps|train_iters": 3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "seed": DEFAULTS["seed"],
    "tuner_type|train_type": "lora",
    "truncation_strategy": "delete",
    "gradient_checkpointing|recompute_granularity": True,
    "torch_dtype|bf16|fp16": "bfloat16",
}
LORA_DEFAULTS = {
    "lora_rank": ("lora_rank", 8),
    "lora_alpha": ("lora_alpha", 32),
    "lora_dropout": ("lora_dropout", 0.05),
    "target_modules": ("lora_targets", "all-linear"),
}
RATES = {"lora": 1e-4, "full": 1e-5}
BETA2 = 0.95
EXAMPLES = 16  # examples of a step if the file has no accumulation
TRUNCATION = {"delete": "drop", "right": "truncate", "split": "split"}
ZERO = {
    "zero0": None,
    "zero1": {"reshard": False},
    "zero2": {"reshard": False},
    "zero3": {"reshard": True},
    "zero2_offload": {"reshard": False, "offload": True},
    "zero3_offload": {"reshard": True, "offload": True},
}


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    source = draft.source

    def finish(draft: RecipeDraft) -> None:
        packing(draft)
        take_preferences(draft)
        if (
            source.get("micro_batch_size") is not None
            or source.get("global_batch_size") is not None
        ):
            each = whole_number(draft.setting("micro_batch_size", 1))
            passes = max(
                whole_number(draft.setting("global_batch_size", EXAMPLES)) // (each * ranks), 1
            )
            batch(draft, ("micro_batch_size", 1), ("passes", passes), ranks)
            draft.note("global_batch_size", "mapped", "of a step over all ranks")
        else:
            each = whole_number(draft.setting("per_device_train_batch_size", 1))
            passes = max(math.ceil(EXAMPLES / each / ranks), 1)
            size = ("per_device_train_batch_size", 1)
            batch(draft, size, ("gradient_accumulation_steps", passes), ranks)
        if source.get("adam_beta2") is None:
            draft.values["adam_betas"] = [draft.values["adam_betas"][0], BETA2]
        draft.at_default = True
        kind = draft.values.get("finetuning_type", "full")
        draft.say("learning_rate", "learning_rate", RATES[kind])
        draft.at_default = False
        resolve_lora(draft, LORA_DEFAULTS, "all weights are trained")
        minimum, rate = source.get("min_lr"), draft.values.get("learning_rate")
        if minimum and rate:
            draft.say("min_lr", "min_lr_ratio", float(minimum) / float(rate))
        resolve_batch(draft)
        if source.get("max_length") is None:
            explanation = "left out, so the model's own limit holds there; cutoff_len is 2048 here"
            draft.note("max_length", "unmapped", explanation)

    return drafted(draft, KEYS, finish, defaults=TOOL_DEFAULTS)


def packing(draft: RecipeDraft) -> None:
    if is_preference_training(draft.source) and draft.source.get("packing"):
        draft.note("packing", "needless", "pairs aren't packed there; the plan decides")
    elif draft.source.get("packing") in (True, "true"):
        row = draft.setting("packing_length", draft.setting("max_length", 2048))
        packed_rows(draft, "packing", whole_number(row))
    elif draft.source.get("padding_free") in (True, "true"):
        examples_kept(draft, "padding_free", True)


def datasets(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps ``ID_OR_PATH:SUBSET#COUNT``, as text or list; COUNT is the number of examples."""
    sources: list[Any] = []
    for name in names_of(setting, None):
        path, _, count = name.partition("#")
        if ":" in path and not path.startswith(("/", ".")):
            path += ":train"  # the split of the subset
        sources.append({"path": path, "max_examples": whole_number(count)} if count else path)
        if "#" in name:
            explanation = f"the first {count} examples of {path}; there they are drawn"
            draft.row(f"{key}: {name}", name, "unmapped", explanation)
    say_sources(draft, key, sources)


def eval_file(draft: RecipeDraft, key: str, setting: Any) -> None:
    names = [setting] if isinstance(setting, str) else list(setting or ())
    if len(names) == 1 and "#" not in names[0]:
        draft.say(key, "eval_data", names[0])
    elif names:
        draft.note(key, "unmapped", "eval_data is one file or name: join them")


def precision(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting == "bfloat16" and not draft.at_default:
        draft.say(key, "weights_dtype", "bfloat16")
    if draft.source.get("bf16") is None and draft.source.get("fp16") is None:
        dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}.get(str(setting))
        if dtype:
            half(dtype)(draft, key, True)


def too_long(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting in TRUNCATION:
        draft.say(key, "too_long", TRUNCATION[setting])
    elif setting is not None:
        draft.note(key, "unmapped", "examples are cut at their end, split or dropped")


def zero(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a name of ms-swift's ZeRO stages, or a file."""
    if setting in ZERO:
        if ZERO[setting]:
            draft.use(key, "fsdp2", ZERO[setting])
        return
    deepspeed(draft, key, setting)


def scale(draft: RecipeDraft, key: str, setting: Any) -> None:
    loss_scope = {"all": "everything", "last_round": "last_answer"}.get(str(setting))
    if loss_scope:
        draft.say(key, "loss_on", loss_scope)
    elif setting not in (None, "default"):
        draft.note(key, "unmapped", "loss is on every answer alike")


def template(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting:
        explanation = (
            f"hasten has no template {setting!r}: give it as a .jinja file (chat_template)"
        )
        draft.note(key, "unmapped", explanation)


def chat(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is False:
        draft.note(key, "unmapped", "a dialogue is always written by a chat template")


KEYS: dict[str, Handler] = (
    TRAINING
    | PREFERENCE_KEYS
    | table("ms_swift")
    | {
        "tuner_type": named("finetuning_type"),
        "train_type": named("finetuning_type"),
        "dataset": datasets,
        "val_dataset": eval_file,
        "split_dataset_ratio": share_or_count,
        "torch_dtype": precision,
        "truncation_strategy": too_long,
        "target_modules": lora_targets("all-linear", None),
        "target_regex": named("lora_targets"),
        "use_rslora": named("lora_rslora", bool),
        "use_dora": named("lora_dora", bool),
        "quant_bits": quantised,
        "bnb_4bit_quant_type": four_bits,
        "template": template,
        "use_chat_template": chat,
        "loss_scale": scale,
        "deepspeed": zero,
        "train_iters": steps,
        "lr": named("learning_rate", float),
        "lr_warmup_fraction": warmup,
        "lr_warmup_iters": warmup,
        "lr_decay_style": TRAINING["lr_scheduler_type"],
        "recompute_granularity": switch("activation_checkpointing", on=(True, "full", "selective")),
        "use_liger_kernel": TRAINING["use_liger_kernel"],
        "fsdp": sharding.fsdp_options,
    }
)
