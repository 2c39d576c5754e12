"""LLaMA-Factory's YAML for supervised and continued training (its ``examples/train_*``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.recipe.importers.draft import (
    TRAINING,
    Draft,
    Handler,
    batch,
    defaults,
    drafted,
    named,
    needless,
    saves,
    switch,
    unmapped,
)

NAME = "LLaMA-Factory"
MARKS = ("stage", "finetuning_type", "model_name_or_path", "template", "cutoff_len", "dataset_dir")
TEMPLATES = {"deepseek": "deepseek-llm", "deepseek3": "deepseek-v3", "deepseekr1": "deepseek-r1"}
CACHED = needless("tokens are cached by what decides them")


def draft_of(given: dict[str, Any], ranks: int) -> Draft:
    def finish(draft: Draft) -> None:
        defaults(draft)
        batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", ranks)
        if given.get("finetuning_type", "lora") == "lora":
            draft.values.setdefault("finetuning_type", "lora")
            draft.values.setdefault("lora_rank", 8)  # its defaults
            draft.values.setdefault("lora_alpha", 2 * draft.values["lora_rank"])

    return drafted(given, KEYS, finish)


def stage(draft: Draft, key: str, value: Any) -> None:
    if value in ("sft", "pt"):
        draft.note(key, "mapped", "records with a loss mask, or text")
    else:
        words = f"hasten train has no stage {value!r}; its techniques work in TRL's trainers"
        draft.note(key, "unmapped", words)


def what_learns(draft: Draft, key: str, value: Any) -> None:
    if value in ("lora", "full"):
        draft.say(key, "finetuning_type", value)
    else:
        draft.note(key, "unmapped", f"there is no {value!r} here: full or lora")


def targets(draft: Draft, key: str, value: Any) -> None:
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or [])
    draft.say(key, "lora_targets", "all-linear" if names == ["all"] else names)


def datasets(draft: Draft, key: str, value: Any) -> None:
    """Names stand in dataset_info.json; a name that is a file is one."""
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value or [])
    info = Path(str(draft.given.get("dataset_dir") or "data")) / "dataset_info.json"
    found = [n if Path(n).suffix else f"{info}:{n}" for n in names]
    draft.say(key, "dataset", found[0] if len(found) == 1 else found)


def template(draft: Draft, key: str, value: Any) -> None:
    known = TEMPLATES.get(str(value))
    if known is None:
        draft.note(key, "mapped", "chat_template: auto, the tokenizer's own, or a near one")
    else:
        draft.say(key, "chat_template", known)


def quantised(draft: Draft, key: str, value: Any) -> None:
    base = {4: "nf4", 8: "int8"}.get(int(value or 0))
    if base is None:
        draft.note(key, "unmapped", "a frozen base has 4 or 8 bits")
    else:
        draft.say(key, "lora_base", base)


def packing(draft: Draft, key: str, value: Any) -> None:
    if value not in (True, "auto"):
        draft.note(key, "needless", "it is off")
        return
    draft.use(key, "packed")
    if "document_attention" not in draft.plan:
        draft.plan.append("document_attention")


def validation(draft: Draft, key: str, value: Any) -> None:
    number = float(value or 0)
    draft.say(key, "held_out", number if number < 1 else int(number))


def workers(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.say(key, "data_workers", int(value))


KEYS: dict[str, Handler] = TRAINING | {
    "model_name_or_path": named("model"),
    "trust_remote_code": needless("code of a model's folder never runs"),
    "adapter_name_or_path": unmapped("a run begins without an adapter: merge it first"),
    "stage": stage,
    "finetuning_type": what_learns,
    "lora_rank": named("lora_rank", int),
    "lora_alpha": named("lora_alpha", int),
    "lora_dropout": named("lora_dropout", float),
    "lora_target": targets,
    "use_rslora": named("lora_rslora", bool),
    "use_dora": named("lora_dora", bool),
    "pissa_init": unmapped("an adapter begins at zero"),
    "loraplus_lr_ratio": unmapped("both factors have one learning rate"),
    "quantization_bit": quantised,
    "quantization_method": needless("int8 and nf4 are hasten's own"),
    "dataset": datasets,
    "dataset_dir": needless("it is part of dataset"),
    "eval_dataset": unmapped("give its file as held_out"),
    "template": template,
    "cutoff_len": named("cutoff_len", int),
    "max_samples": named("max_records", int),
    "overwrite_cache": CACHED,
    "tokenized_path": CACHED,
    "preprocessing_num_workers": workers,
    "preprocessing_batch_size": CACHED,
    "packing": packing,
    "neat_packing": packing,
    "train_on_prompt": unmapped("loss is on the assistant's tokens"),
    "mask_history": unmapped("every answer of a dialogue carries loss"),
    "val_size": validation,
    "per_device_train_batch_size": lambda draft, key, value: None,  # in batch()
    "gradient_accumulation_steps": lambda draft, key, value: None,
    "disable_gradient_checkpointing": needless("hasten recomputes where the plan says recompute"),
    "pure_bf16": switch("bf16_master_weights"),
    "flash_attn": needless("document_attention chooses the kernel"),
    "enable_liger_kernel": switch("fused_layers"),
    "use_unsloth": unmapped("hasten has kernels of its own (fused_layers)"),
    "upcast_layernorm": needless("norms are computed in float32"),
    "plot_loss": needless("`hasten report RUN` draws it"),
    "save_only_model": needless("checkpoint_every decides"),
    "save_steps": saves,
    "include_num_input_tokens_seen": needless("tokens are counted"),
    "use_badam": unmapped("there is no BAdam"),
    "use_galore": unmapped("there is no GaLore"),
}
