"""Settings that most trainers share, under the names of Hugging Face's ``TrainingArguments``.

Meanings and defaults: transformers' ``training_args.py`` and ``optimization.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.foreign_files import parse_json
from hasten.recipe.importers.draft import (
    Handler,
    RecipeDraft,
    default_of,
    is_off,
    names_of,
    switch,
    table,
    whole_number,
)

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"),
    *("adamw_torch_npu_fused", "adamw_torch_xla", "adam", "adamw_bnb_32bit"),
)
PAGED = ("paged_adamw_32bit", "paged_adamw")  # 32-bit moments that move to host memory at need
INT8 = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
WRITERS = ("tensorboard", "wandb", "mlflow")
BETAS = [0.9, 0.999]  # the other trainers' defaults
EPSILON = 1e-8
ANOTHER_FORMAT = "another number format is on already, which is kept"
COUNT_STEPS = "set checkpoint_every in steps, or dynamic; `hasten check` counts the steps"
CUT_TEXTS = "a longer text is cut there; here it continues in further examples"
LOGGING_STEPS = {"TRL": 10, "axolotl": 10}  # other tools: 500
# Defaults of TrainingArguments.
DEFAULTS: dict[str, Any] = {
    "adam_beta1|adam_beta2": BETAS[0],
    "num_train_epochs|max_steps": 3,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "seed": 42,
}


def epochs(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps full passes; rounds a fraction up, and reports it."""
    if setting is None:
        return
    passes = math.ceil(float(setting))
    draft.say(key, "epochs", passes)
    if passes != float(setting):
        draft.note(key, "unmapped", f"epochs are whole here: {passes} instead of {setting}")


def steps(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is not None and float(setting) > 0:
        draft.say(key, "max_steps", whole_number(setting))


def schedule(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is None:
        return
    schedule_name = SCHEDULES.get(str(setting).lower())
    if schedule_name is None:
        available = ", ".join(sorted(set(SCHEDULES.values())))
        explanation = (
            f"there is no schedule {setting!r}: {default_of('lr_schedule')} is used instead; "
            f"hasten has {available}"
        )
        draft.note(key, "unmapped", explanation)
        return
    draft.say(key, "lr_schedule", schedule_name)
    if schedule_name == "wsd":
        explanation = (
            "wsd falls linearly over the last tenth of all steps; there by a cosine, over "
            "num_decay_steps (LLaMA-Factory: two thirds of the steps)"
        )
        draft.note(key, "unmapped", explanation)


def schedule_settings(draft: RecipeDraft, key: str, written: Any) -> None:
    """Maps the lowest rate in ``lr_scheduler_kwargs``, a share or a rate."""
    settings = parse_json(written, key) if isinstance(written, str) and written.strip() else written
    for name, part_setting in (settings or {}).items():
        peak = draft.source.get("learning_rate")
        if name == "min_lr_rate":
            draft.say(key, "min_lr_ratio", float(part_setting))
        elif name == "min_lr" and peak:
            draft.say(key, "min_lr_ratio", float(part_setting) / float(peak))
        elif part_setting is not None:
            draft.row(
                f"{key}.{name}", part_setting, "unmapped", "hasten's schedules have no such setting"
            )


def warmup(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps warm-up steps, or a share below 1 of all steps, under either key."""
    number = float(setting or 0)
    if number and key == "warmup_ratio" and float(draft.source.get("warmup_steps") or 0):
        draft.note(key, "contradicts", "warmup_steps is used, as in Trainer")
    elif number:
        draft.say(key, "warmup_steps", number if number < 1 else whole_number(number))
        explanation = "the first step has 1 / (steps + 1) of the rate here, and 0 there"
        draft.note(key, "mapped", explanation)


def optimizer(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is None:
        return
    if setting in ADAMW:
        draft.note(key, "mapped", "AdamW is the optimizer where the plan names none")
    elif setting in PAGED:
        draft.note(key, "mapped", "AdamW with 32-bit moments; they stay on the device")
    elif setting in INT8:
        draft.use(key, "compact_adamw", {"moments": "int8"})
    elif setting == "muon":
        draft.use(key, "muon")
    else:
        draft.note(key, "unmapped", f"there is no optimizer {setting!r}: AdamW is used instead")


def beta(index: int) -> Handler:
    """Returns the handler of one of AdamW's betas; the other one keeps its default."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        betas = list(draft.values.get("adam_betas", BETAS))
        betas[index] = BETAS[index] if setting is None else float(setting)
        draft.values["adam_betas"] = betas
        draft.why["adam_betas"] = f"{draft.tool}'s default" if draft.at_default else key
        draft.note(key, "mapped", f"adam_betas: {betas}")

    return handle


def epsilon(draft: RecipeDraft, key: str, setting: Any) -> None:
    same = setting is None or float(setting) == EPSILON
    explanation = f"hasten's AdamW has {EPSILON}" + ("" if same else f", not {setting}")
    draft.note(key, "needless" if same else "unmapped", explanation)


def clipping(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the norm for clipping; zero means no clipping."""
    if setting is not None:
        draft.say(key, "max_grad_norm", float(setting) or None)


def half(dtype: str) -> Handler:
    """Returns the handler of ``bf16: true`` or ``fp16: true``, of which one may be on."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if setting == "full":
            pure(dtype)(draft, key, True)
        elif setting not in (True, "auto", "true"):
            return
        elif "autocast" in draft.techniques:
            if not draft.at_default:
                draft.note(key, "contradicts", ANOTHER_FORMAT)
        else:
            draft.use(key, "autocast", {"dtype": dtype})

    return handle


def pure(dtype: str) -> Handler:
    """Returns the handler of weights in 16 bits without 32-bit masters."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        if setting not in (True, "auto", "true"):
            return
        if "autocast" in draft.techniques:
            draft.note(key, "contradicts", ANOTHER_FORMAT)
        elif dtype == "bf16":
            draft.say(key, "weights_dtype", "bfloat16")
        else:
            draft.add("autocast", {"dtype": dtype})
            draft.note(key, "unmapped", "weights stay float32 here; products are in fp16")

    return handle


def writers(draft: RecipeDraft, key: str, setting: Any) -> None:
    requested = [setting] if isinstance(setting, str) else list(setting or [])
    supported = [w for w in requested if w in WRITERS]
    if supported:
        draft.say(key, "log_to", supported)
    unsupported = [w for w in requested if w not in (*WRITERS, "none", "all", None)]
    if unsupported:
        draft.note(key, "unmapped", f"hasten doesn't write to {', '.join(map(str, unsupported))}")


def quantised(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the number of bits of a frozen base."""
    base = {"4": "nf4", "8": "int8"}.get(str(setting).removesuffix(".0"))
    if base:
        draft.say(key, "lora_base", base)
    elif not is_off(setting):
        draft.note(key, "unmapped", "a frozen base has 4 or 8 bits (lora_base)")


def lora_targets(all_linear: str, separator: str | None = ",") -> Handler:
    """Returns the handler of module names; the name ``all_linear`` means all linear layers."""

    def handle(draft: RecipeDraft, key: str, setting: Any) -> None:
        names = ["all-linear" if n == all_linear else n for n in names_of(setting, separator)]
        if names:
            draft.say(key, "lora_targets", names[0] if names == ["all-linear"] else names)

    return handle


def resolve_lora(
    draft: RecipeDraft,
    defaults: Mapping[str, tuple[str, Any]],
    without: str,
    resolver: str = "linear_names",
) -> None:
    """Sets the tool's defaults for LoRA, or removes LoRA's settings if all weights are trained.

    Args:
        defaults: by the tool's key, the recipe's key and the tool's default.
        without: the reason for removed settings.
        resolver: the recipe's ``lora_resolver`` that reads targets as the tool does.
    """
    if draft.values.get("finetuning_type") != "lora":
        for name in [name for name in draft.values if name.startswith("lora_")]:
            draft.withdraw(name, without)
        return
    draft.at_default = True
    for key, (name, setting) in defaults.items():
        draft.say(key, name, setting)
    draft.at_default = False
    if "lora_targets" in draft.values:
        draft.values["lora_resolver"] = resolver
        draft.why["lora_resolver"] = f"as {draft.tool} reads lora_targets"


def say_sources(draft: RecipeDraft, key: str, sources: list[Any]) -> None:
    """Sets the recipe's data sets; a single one without settings is a text."""
    one = len(sources) == 1 and isinstance(sources[0], str)
    if sources:
        draft.say(key, "dataset", sources[0] if one else sources)


activation_checkpointing = switch(
    "activation_checkpointing",
    on=(True, "true", "unsloth", "offload", "offload_disk"),
)


def share_or_count(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the eval data: a share below 1, or a number of examples."""
    number = float(setting or 0)
    draft.say(key, "eval_data", number if number < 1 else whole_number(number))


def examples_kept(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps batches without padding: one row with attention within documents."""
    if setting in (True, "auto", "true"):
        draft.use(key, "packed")
        draft.add("document_attention")


def packed_rows(draft: RecipeDraft, key: str, row_tokens: int) -> None:
    """Maps packing to rows; the source's batch size then counts rows.

    A row is a micro-batch, so the plan needs no gradient accumulation.
    """
    draft.row_tokens = row_tokens
    draft.use(key, "packed_epoch", {"row_tokens": row_tokens})
    draft.add("packed")
    draft.add("document_attention")


def batch(
    draft: RecipeDraft, size: tuple[str, int], accumulation: tuple[str, int], ranks: int
) -> None:
    """Sets the global batch: examples of a pass x passes x ranks; for packed rows in tokens.

    Args:
        size: key of the examples of a pass on a rank, and the tool's default.
        accumulation: key of the passes, and the tool's default.
    """
    key, each = size[0], whole_number(draft.setting(*size))
    passes = whole_number(draft.setting(*accumulation))
    draft.at_default = draft.source.get(key) is None
    count = each * passes * ranks
    if draft.row_tokens:
        draft.say(key, "global_batch_tokens", count * draft.row_tokens)
        unit = f"rows of {draft.row_tokens} tokens"
    else:
        draft.say(key, "global_batch_size", count)
        unit = "examples"
    draft.at_default = False
    if accumulation[0] in draft.source:
        explanation = f"{each} {unit} x {passes} passes x {ranks} ranks make the global batch"
        draft.note(accumulation[0], "mapped", explanation)
    if passes > 1 and not draft.row_tokens:
        draft.add("gradient_accumulation", {"micro_batch_size": each})


def resumed(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting in (True, "auto"):
        draft.say(key, "resume", "auto")
    elif isinstance(setting, str) and setting:
        explanation = "another trainer's checkpoint can't be resumed: name its model as `model`"
        draft.note(key, "unmapped", explanation)


def saves(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps ``save_steps``; ``save_strategy`` may make it needless."""
    strategy = draft.source.get("save_strategy")
    number = (
        float(setting)
        if isinstance(setting, int | float | str) and setting not in ("", True)
        else 0
    )
    if strategy == "epoch" or (strategy is not None and is_off(strategy)):
        draft.note(key, "needless", f"save_strategy is {strategy}")
    elif number >= 1:
        draft.say(key, "checkpoint_every", whole_number(number))
    elif number > 0:
        draft.note(key, "unmapped", COUNT_STEPS)
    else:
        draft.note(key, "needless", "the model is saved at the end")


def save_strategy(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting in ("epoch", "best"):
        draft.note(key, "unmapped", COUNT_STEPS)
    else:
        draft.note(key, "needless", "checkpoint_every decides")


def evaluated(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps ``eval_steps``: a step count, or a share of all steps; off without a strategy."""
    strategy = draft.setting("eval_strategy", draft.source.get("evaluation_strategy"))
    number = float(setting or 0)
    if strategy in (False, "no", "epoch"):
        draft.note(key, "needless", f"eval_strategy is {strategy}")
    elif number:
        draft.say(key, "eval_every", number if number < 1 else whole_number(number))


def eval_strategy(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the strategy; ``steps`` without ``eval_steps`` uses ``logging_steps``, as in Trainer."""
    if setting == "epoch":
        evaluations(draft, key, 1)
    elif setting == "steps" and not float(draft.source.get("eval_steps") or 0):
        number = float(draft.setting("logging_steps", LOGGING_STEPS.get(draft.tool, 500)))
        draft.say(key, "eval_every", number if number < 1 else whole_number(number))
    else:
        draft.note(key, "needless", "eval_every decides")


def per_epoch(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps axolotl's number of evaluations in an epoch."""
    if setting:
        evaluations(draft, key, float(setting))


def evaluations(draft: RecipeDraft, key: str, each: float) -> None:
    """Sets ``eval_every`` to the share of all steps for ``each`` evaluations in an epoch."""
    default = 1 if draft.tool == "axolotl" else DEFAULTS["num_train_epochs|max_steps"]
    passes = draft.setting("num_train_epochs", draft.setting("num_epochs", default))
    count = each * math.ceil(float(passes))
    if float(draft.source.get("max_steps") or 0) > 0:
        explanation = "set eval_every in steps; `hasten check` counts the steps"
        draft.note(key, "unmapped", explanation)
    elif count <= 1:
        draft.note(key, "needless", "eval examples are evaluated at the end")
    else:
        draft.say(key, "eval_every", round(1 / count, 6))


def best_metric(draft: RecipeDraft, key: str, setting: Any) -> None:
    is_same = is_off(setting) or setting in ("loss", "eval_loss")
    explanation = "best/ has the weights of the least eval loss, or see best_metric"
    draft.note(key, "needless" if is_same else "unmapped", explanation)


def sampling(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting == "group_by_length":
        draft.use(key, "length_grouped")
    elif setting not in (None, "random"):
        draft.note(key, "unmapped", "examples are drawn at random")


def resolve_batch(draft: RecipeDraft) -> None:
    """Resolves keys that depend on each other, after all of them are read."""
    if "max_steps" in draft.values:  # as in Trainer
        draft.withdraw("epochs", "max_steps ends the training, as in that tool")
    scheduler = draft.setting("lr_scheduler_type", draft.source.get("lr_scheduler"))
    if scheduler == "constant":
        explanation = (
            "a constant schedule ignores warm-up, as transformers' get_constant_schedule does"
        )
        draft.withdraw("warmup_steps", explanation)
    draft.values.setdefault("eval_data", 0.0)
    draft.why.setdefault("eval_data", f"eval_data: {draft.tool} holds nothing out by itself")
    if not draft.values["eval_data"]:
        draft.withdraw("eval_every", "nothing is held out")
    if "eval_every" not in draft.values:
        explanation = "patience counts evaluations: set eval_every and eval_data too"
        draft.withdraw("patience", explanation, "unmapped")


def deepspeed(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a path, which may be relative to a parent of the file's folder, or the settings."""
    if isinstance(setting, Mapping) and setting:
        draft.say(key, "deepspeed", dict(setting))
        draft.note(key, "mapped", "deepspeed: the same settings")
    elif isinstance(setting, str) and setting:
        path = found_file(setting, draft.folder)
        if path is None:
            explanation = (
                f"there is no file {setting} here or above the file: name it as `deepspeed`"
            )
            draft.note(key, "unmapped", explanation)
            return
        draft.say(key, "deepspeed", str(path))


def found_file(name: str, folder: Path) -> Path | None:
    """Returns a file relative to the working folder, ``folder`` or one of its parents."""
    above = [folder, *folder.resolve().parents]
    places = [Path(name), *(base / name for base in above)]
    path = next((candidate for candidate in places if candidate.is_file()), None)
    if path is None or path == Path(name):
        return path
    path = path.resolve()
    working_dir = Path.cwd().resolve()
    return path.relative_to(working_dir) if path.is_relative_to(working_dir) else path


def four_bits(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the format of a frozen 4-bit base, alone or in the settings of bitsandbytes."""
    is_mapping = isinstance(setting, Mapping)
    kind = setting.get("bnb_4bit_quant_type") if is_mapping else setting
    frozen = (draft.source.get(name) for name in ("load_in_4bit", "quantization_bit", "quant_bits"))
    if is_off(kind) or kind == "nf4" or not any(bits in (True, 4, "4") for bits in frozen):
        draft.note(key, "needless", "weights in 4 bits are nf4")
    else:
        draft.note(key, "unmapped", f"weights in 4 bits are nf4 here, not {kind}")


def accelerator(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps settings of accelerate; ``split_batches`` divides a batch among the ranks."""
    is_json = isinstance(setting, str) and setting[:1] == "{"
    settings = parse_json(setting, key) if is_json else setting
    if isinstance(settings, Mapping) and not settings.get("split_batches"):
        draft.note(key, "needless", "hasten starts its own processes, or joins the launcher's")
    elif not is_off(settings):
        explanation = (
            "split_batches shares a batch among the ranks there; here it is one rank's: "
            "set global_batch_size"
        )
        draft.note(key, "unmapped", explanation)


TRAINING: dict[str, Handler] = table("training") | {
    "accelerator_config": accelerator,
    "num_train_epochs": epochs,
    "max_steps": steps,
    "lr_scheduler_type": schedule,
    "lr_scheduler_kwargs": schedule_settings,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "optim": optimizer,
    "adam_beta1": beta(0),
    "adam_beta2": beta(1),
    "adam_epsilon": epsilon,
    "max_grad_norm": clipping,
    "bf16": half("bf16"),
    "fp16": half("fp16"),
    "gradient_checkpointing": activation_checkpointing,
    "save_steps": saves,
    "save_strategy": save_strategy,
    "eval_steps": evaluated,
    "eval_strategy": eval_strategy,
    "train_sampling_strategy": sampling,
    "evaluation_strategy": eval_strategy,
    "metric_for_best_model": best_metric,
    "report_to": writers,
    "resume_from_checkpoint": resumed,
    "deepspeed": deepspeed,
}
