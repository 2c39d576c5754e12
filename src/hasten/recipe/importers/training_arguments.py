"""``TrainingArguments`` of transformers' Trainer and its ``run_clm``, and TRL's configurations.

Meanings and defaults: transformers' ``training_args.py``, TRL's ``trainer/sft_config.py``,
``trainer/base_config.py``, ``trainer/dpo_config.py``, ``trainer/kto_config.py``,
``trainer/reward_config.py``, ``trainer/model_config.py`` and ``scripts/utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.data.sources import hub_name
from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    LEFT_OUT,
    Handler,
    RecipeDraft,
    drafted,
    is_off,
    named,
    needless,
    table,
    whole_number,
)
from hasten.recipe.importers.preferences import KEYS as PREFERENCE_KEYS
from hasten.recipe.importers.preferences import (
    is_preference_training,
    take_preferences,
    training_of,
)
from hasten.recipe.importers.training import (
    CUT_TEXTS,
    DEFAULTS,
    TRAINING,
    batch,
    examples_kept,
    four_bits,
    packed_rows,
    resolve_batch,
    resolve_lora,
)

NAME = "TrainingArguments"
MARKS = ("per_device_train_batch_size", "num_train_epochs", "output_dir", "lr_scheduler_type")
# Keys of TRL's files that TrainingArguments doesn't have.
TRL_MARKS = (
    *("model_name_or_path", "dataset_name", "max_length", "max_seq_length", "packing", "use_peft"),
    *("assistant_only_loss", "completion_only_loss", "dataset_text_field", "lora_r", "eos_token"),
    *("dataset_train_split", "padding_free", "attn_implementation", "chat_template_path", "dtype"),
)
# Keys of transformers' example script run_clm.py.
SCRIPT_MARKS = (
    *("train_file", "validation_file", "block_size", "dataset_config_name", "config_name"),
    *("max_train_samples", "validation_split_percentage", "keep_linebreaks"),
)
BLOCK = 1024  # tokens of a row of run_clm, if the model supports as many
TRL_LENGTH = 1024  # tokens
TRL_DEFAULTS = {
    **DEFAULTS,
    "learning_rate": 2e-5,
    "max_length|max_seq_length": TRL_LENGTH,
    "gradient_checkpointing": True,
    "bf16|fp16": True,
}


PREFERENCE_RATES = {"rm": 1e-4}  # else 1e-6


def is_script(source: Mapping[str, Any]) -> bool:
    """Returns True if the file is for run_clm.py, which cuts texts into blocks."""
    return any(mark in source for mark in SCRIPT_MARKS)


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    """Builds the draft; keys with their default value in a full dump have no row."""
    training = training_of(draft.source)
    trl = any(mark in draft.source for mark in TRL_MARKS) and not is_script(draft.source)
    trl = trl or training is not None
    draft.tool = "TRL" if trl else "transformers"

    def finish(draft: RecipeDraft) -> None:
        if trl:
            if training is None:
                trl_packing(draft)
                trl_loss(draft)
            take_preferences(draft)
            trl_evaluation(draft)
        elif is_script(draft.source):
            blocks(draft)
        passes = ("gradient_accumulation_steps", 1)
        batch(draft, ("per_device_train_batch_size", 8), passes, ranks)
        resolve_batch(draft)
        lora(draft)

    defaults = TRL_DEFAULTS if trl else DEFAULTS
    if training is not None:
        defaults = defaults | {"learning_rate": PREFERENCE_RATES.get(training.stage, 1e-6)}
    return drafted(draft, KEYS, finish, quiet=(False, "", [], {}), defaults=defaults)


def lora(draft: RecipeDraft) -> None:
    """Sets TRL's defaults for LoRA, or removes all LoRA keys."""
    defaults = {
        "lora_r": ("lora_rank", 16),
        "lora_alpha": ("lora_alpha", 32),
        "lora_dropout": ("lora_dropout", 0.05),
    }
    resolve_lora(draft, defaults, "use_peft is off", "peft")
    is_lora = draft.values.get("finetuning_type") == "lora"
    if is_lora and "lora_targets" not in draft.values:
        draft.values["lora_targets"] = "all-linear"
        draft.why["lora_targets"] = "lora_target_modules: left out"
        explanation = "left out, so PEFT chooses by architecture; all-linear here"
        draft.note("lora_target_modules", "unmapped", explanation)


def blocks(draft: RecipeDraft) -> None:
    """Maps concatenated texts to packed rows of ``block_size`` tokens."""
    draft.at_default = draft.source.get("block_size") is None
    row = whole_number(draft.setting("block_size", BLOCK))
    draft.say("block_size", "cutoff_len", row)
    packed_rows(draft, "block_size", row)
    draft.at_default = False
    explanation = "there texts of a row attend to each other; here each attends to itself"
    draft.row("block_size", row, "unmapped", explanation)


def trl_packing(draft: RecipeDraft) -> None:
    source = draft.source
    if source.get("packing") in (True, "true"):
        strategy = source.get("packing_strategy") or "bfd"
        length = draft.setting("max_length", draft.setting("max_seq_length", TRL_LENGTH))
        packed_rows(draft, "packing", whole_number(length))
        if strategy == "wrapped":
            explanation = "examples are cut at the end of a row there; here each stays whole"
            draft.note("packing_strategy", "unmapped", explanation)
        elif strategy == "bfd_split":
            draft.say("packing_strategy", "too_long", "split")
    elif source.get("padding_free") in (True, "true"):
        examples_kept(draft, "padding_free", True)


def trl_loss(draft: RecipeDraft) -> None:
    """Maps the trained tokens: by default TRL trains every token of ``messages``."""
    source, key = draft.source, "assistant_only_loss"
    if source.get(key) in (True, "true"):
        draft.note(key, "mapped", "loss is on the assistant's tokens")
        return
    explanation = "texts of prompt and completion have no chat template there; here they have"
    draft.note("completion_only_loss", "unmapped", explanation)
    if source.get("completion_only_loss") in (True, "true"):
        draft.note("completion_only_loss", "mapped", "loss is on the completion")
        return
    draft.at_default = key not in source
    draft.say(key, "loss_on", "everything")
    draft.at_default = False
    if source.get("completion_only_loss") is None:
        explanation = "left out: set loss_on: answers if the examples are prompt and completion"
        draft.note("completion_only_loss", "unmapped", explanation)


def dataset(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a hub name with configuration and split, or a path."""
    if not setting:
        return
    name = with_split(draft, str(setting), draft.source.get("dataset_train_split") or "train")
    most = draft.source.get("max_train_samples")
    draft.say(
        key, "dataset", [{"path": name, "max_examples": whole_number(most)}] if most else name
    )
    if most:
        draft.note("max_train_samples", "mapped", "max_examples of the data set, the first ones")


def with_split(draft: RecipeDraft, name: str, split: str) -> str:
    """Returns a recipe's name for a data set with its configuration and split."""
    config = draft.source.get("dataset_config") or draft.source.get("dataset_config_name")
    if config:
        return f"{name}:{config}:{split}"
    return name if split == "train" else f"{name}:{split}"


def trl_evaluation(draft: RecipeDraft) -> None:
    """Maps the eval split of the data set, which TRL uses if ``eval_strategy`` is set."""
    source, key = draft.source, "dataset_test_split"
    if is_off(source.get("eval_strategy")):
        return
    split, name = source.get(key) or "test", source.get("dataset_name")
    if name and hub_name(str(name)):
        draft.at_default = not source.get(key)
        draft.say(key, "eval_data", with_split(draft, str(name), str(split)))
        draft.at_default = False
    else:
        draft.note(key, "unmapped", f"give the file of the split {split} as eval_data")


def mixture(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps TRL's ``datasets``: a list of path, name, split."""
    sources = []
    for number, entry in enumerate(setting or ()):
        fields = dict(entry)
        source, config = str(fields.pop("path")), fields.pop("name", None)
        split = fields.pop("split", None) or "train"
        source += f":{config}:{split}" if config else "" if split == "train" else f":{split}"
        sources.append(source)
        for name, part_setting in fields.items():
            if not is_off(part_setting):
                explanation = (
                    "a share of the whole mixture there; here all examples are read: give the "
                    "source a weight, the share of its own examples"
                    if name == "fraction"
                    else "hasten reads a source without this"
                )
                draft.row(f"{key}[{number}].{name}", part_setting, "unmapped", explanation)
    if sources:
        draft.say(key, "dataset", sources)


def text_field(draft: RecipeDraft, key: str, setting: Any) -> None:
    if draft.source.get("max_length", TRL_LENGTH) is not None:
        draft.row("max_length", draft.source.get("max_length", LEFT_OUT), "unmapped", CUT_TEXTS)
    if setting not in (None, "", "text"):
        draft.say(key, "columns", {"text": str(setting)})
    else:
        draft.note(key, "needless", "text is the column's name here too")


def targets(draft: RecipeDraft, key: str, setting: Any) -> None:
    names = setting if isinstance(setting, str) else list(setting or ())
    if isinstance(names, list) and len(names) == 1:
        names = names[0]  # as TRL's ModelConfig does
    if names:
        draft.say(key, "lora_targets", "all-linear" if "all-linear" in names else names)


def length(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is None and not draft.at_default:
        if key in draft.source:
            draft.note(key, "unmapped", "examples aren't cut there; cutoff_len limits them here")
        return
    draft.say(key, "cutoff_len", whole_number(setting))


def loss(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Notes the loss; files with an unsupported loss have been refused."""
    if is_preference_training(draft.source):
        draft.note(key, "mapped", "stage, and preference: loss")
        return
    kernels = ("nll", "chunked_nll", "cross_entropy")
    if not is_off(setting):
        fate: Any = "needless" if setting in kernels else "unmapped"
        draft.note(key, fate, "loss is the negative log-likelihood")


def precision(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting == "bfloat16":
        draft.say(key, "weights_dtype", "bfloat16")
    elif setting == "float16":
        explanation = "weights are float32 here; products are in the format of fp16"
        draft.note(key, "unmapped", explanation)
    else:
        draft.note(key, "needless", "weights are float32")


KEYS: dict[str, Handler] = (
    TRAINING
    | PREFERENCE_KEYS
    | table("training_arguments")
    | {
        "dataset_name": dataset,
        "train_file": dataset,
        "datasets": mixture,
        "dataset_text_field": text_field,
        "max_length": length,
        "max_seq_length": length,
        "loss_type": loss,
        "dtype": precision,
        "torch_dtype": precision,
        "lora_target_modules": targets,
        "bnb_4bit_quant_type": four_bits,
        "use_rslora": named("lora_rslora", bool),
        "use_dora": named("lora_dora", bool),
        "shuffle_dataset": needless("examples are shuffled each epoch, as by Trainer"),
        "fsdp": sharding.fsdp_options,
        "fsdp_config": sharding.config(lambda settings: bool(settings.get("fsdp"))),
    }
)
