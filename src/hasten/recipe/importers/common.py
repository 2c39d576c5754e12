"""Settings that most trainers share, under the names of Hugging Face's ``TrainingArguments``."""

from __future__ import annotations

import math
from typing import Any

from hasten.recipe.importers.draft import Draft, Handler, named, needless, switch, unmapped

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused")
INT8 = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_8bit")
WRITERS = ("tensorboard", "wandb", "mlflow")
BETAS = [0.9, 0.999]  # what the other trainers take where the file says nothing
EPSILON = 1e-8
PRINTED = needless("hasten writes a line per step into metrics.jsonl")
MEMORY = needless("hasten copies and pins batches by itself (technique prefetched)")


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Whole passes; a part of one is rounded up, and said so."""
    whole = math.ceil(float(value))
    draft.say(key, "epochs", whole)
    if whole != float(value):
        draft.note(key, "unmapped", f"epochs are whole here: {whole} in the place of {value}")


def steps(draft: Draft, key: str, value: Any) -> None:
    if value is not None and int(value) > 0:
        draft.say(key, "max_steps", int(value))
    else:
        draft.note(key, "needless", "it is off")


def schedule(draft: Draft, key: str, value: Any) -> None:
    found = SCHEDULES.get(str(value))
    if found is None:
        known = ", ".join(sorted(set(SCHEDULES.values())))
        draft.note(key, "unmapped", f"there is no schedule {value!r}; hasten has {known}")
    else:
        draft.say(key, "lr_schedule", found)


def warmup(draft: Draft, key: str, value: Any) -> None:
    """Steps, or a share of all steps below 1, under either of the two names."""
    number = float(value or 0)
    if number:
        draft.say(key, "warmup_steps", number if number < 1 else int(number))
    else:
        draft.note(key, "needless", "it is off")


def optimizer(draft: Draft, key: str, value: Any) -> None:
    if value in ADAMW:
        draft.note(key, "mapped", "AdamW is the optimizer where the plan names none")
    elif value in INT8:
        draft.use(key, "compact_adamw", {"moments": "int8"})
    elif value == "muon":
        draft.use(key, "muon")
    else:
        draft.note(key, "unmapped", f"there is no optimizer {value!r}: AdamW takes its place")


def beta(place: int) -> Handler:
    """One of AdamW's two, beside the other tools' default of the second one."""

    def handle(draft: Draft, key: str, value: Any) -> None:
        found = list(draft.values.get("adam_betas", BETAS))
        found[place] = BETAS[place] if value is None else float(value)
        draft.values["adam_betas"], draft.why["adam_betas"] = found, "adam_beta1, adam_beta2"
        draft.note(key, "mapped", f"adam_betas: {found}")

    return handle


def epsilon(draft: Draft, key: str, value: Any) -> None:
    same = value is None or float(value) == EPSILON
    words = f"hasten's AdamW has {EPSILON}" + ("" if same else f", not {value}")
    draft.note(key, "needless" if same else "unmapped", words)


def defaults(draft: Draft) -> None:
    """What the other trainers do where the file says nothing and hasten does something else."""
    if "adam_betas" not in draft.values:
        draft.values["adam_betas"], draft.why["adam_betas"] = [*BETAS], "that tool's default"


def half(dtype: str) -> Handler:
    """``bf16: true`` and ``fp16: true``, of which one may be on."""

    def handle(draft: Draft, key: str, value: Any) -> None:
        if value not in (True, "auto", "full"):
            draft.note(key, "needless", "it is off")
        elif "autocast" in draft.techniques or "bf16_master_weights" in draft.techniques:
            draft.note(key, "contradicts", "another number format is on already, which is kept")
        else:
            draft.use(key, "autocast", {"dtype": dtype})

    return handle


def writers(draft: Draft, key: str, value: Any) -> None:
    asked = [value] if isinstance(value, str) else list(value or [])
    known = [w for w in asked if w in WRITERS]
    if known:
        draft.say(key, "log_to", known)
    rest = [w for w in asked if w not in (*WRITERS, "none", "all")]
    if rest:
        draft.note(key, "unmapped", f"hasten doesn't write to {', '.join(map(str, rest))}")
    elif not known:
        draft.note(key, "needless", "it is off")


def recompute(draft: Draft, key: str, value: Any) -> None:
    on = value in (True, "true", "unsloth", "offload")
    if on:
        draft.use(key, "recompute")
    else:
        draft.note(key, "needless", "it is off")


def batch(draft: Draft, each: str, accumulation: str, ranks: int) -> None:
    """Records of a pass x passes x ranks make the global batch; the cut stays as it was."""
    size = int(draft.given.get(each) or 1)
    passes = int(draft.given.get(accumulation) or 1)
    draft.say(each, "global_batch_size", size * passes * ranks)
    if accumulation in draft.given:
        words = f"{size} records x {passes} passes x {ranks} ranks make the global batch"
        draft.note(accumulation, "mapped", words)
    if passes > 1:
        draft.use(each, "accumulate", {"micro_batch_size": size})


def resumed(draft: Draft, key: str, value: Any) -> None:
    if value in (True, "auto"):
        draft.say(key, "resume", "auto")
    elif isinstance(value, str) and value:
        words = "another trainer's checkpoint can't be gone on with: name its model as `model`"
        draft.note(key, "unmapped", words)
    else:
        draft.note(key, "needless", "it is off")


def saves(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
        draft.say(key, "checkpoint_every", int(value))
    else:
        draft.note(key, "needless", "the model is saved at the end")


def deepspeed(draft: Draft, key: str, value: Any) -> None:
    if isinstance(value, str) and value:
        draft.say(key, "deepspeed", value)
    else:
        draft.note(key, "needless", "it is off")


TRAINING: dict[str, Handler] = {
    "output_dir": named("output"),
    "learning_rate": named("learning_rate", float),
    "num_train_epochs": epochs,
    "max_steps": steps,
    "lr_scheduler_type": schedule,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "weight_decay": named("weight_decay", float),
    "max_grad_norm": named("max_grad_norm", float),
    "label_smoothing_factor": named("label_smoothing", float),
    "seed": named("seed", int),
    "data_seed": needless("the data's order follows seed"),
    "optim": optimizer,
    "adam_beta1": beta(0),
    "adam_beta2": beta(1),
    "adam_epsilon": epsilon,
    "bf16": half("bf16"),
    "fp16": half("fp16"),
    "tf32": unmapped("hasten has no switch for TF32"),
    "gradient_checkpointing": recompute,
    "gradient_checkpointing_kwargs": needless("recomputation never re-enters autograd"),
    "save_steps": saves,
    "save_strategy": needless("checkpoint_every decides"),
    "save_total_limit": needless("the technique checkpoints keeps three"),
    "save_safetensors": needless("nothing else is written"),
    "eval_steps": named("eval_every", int),
    "eval_strategy": needless("eval_every decides"),
    "evaluation_strategy": needless("eval_every decides"),
    "per_device_eval_batch_size": needless("16 records at once"),
    "eval_accumulation_steps": needless("sums alone are kept"),
    "logging_steps": PRINTED,
    "logging_dir": PRINTED,
    "logging_strategy": PRINTED,
    "logging_first_step": PRINTED,
    "disable_tqdm": PRINTED,
    "report_to": writers,
    "run_name": needless("a run is known by its folder"),
    "overwrite_output_dir": needless("an earlier run moves to previous/"),
    "ddp_timeout": needless("link_seconds bounds how long a rank waits"),
    "ddp_find_unused_parameters": needless("unused parameters are found"),
    "dataloader_num_workers": MEMORY,
    "dataloader_pin_memory": MEMORY,
    "dataloader_prefetch_factor": MEMORY,
    "dataloader_drop_last": needless("the last step may be smaller"),
    "remove_unused_columns": needless("columns that aren't needed are left"),
    "group_by_length": switch("length_grouped"),
    "resume_from_checkpoint": resumed,
    "deepspeed": deepspeed,
    "torch_compile": switch("compiled"),
    "use_liger_kernel": switch("fused_layers"),
    "neftune_noise_alpha": unmapped("hasten adds no noise to embeddings"),
    "push_to_hub": unmapped("hasten uploads nothing"),
    "do_train": needless("hasten train trains"),
    "do_eval": needless("held-out records are evaluated at the end"),
    "do_predict": unmapped("hasten train doesn't predict"),
    "load_best_model_at_end": needless("best/ holds it where eval_every is set"),
}
