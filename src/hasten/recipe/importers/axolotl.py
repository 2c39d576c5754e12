"""axolotl's YAML for full and adapter training of causal language models."""

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
    epochs,
    named,
    needless,
    recompute,
    schedule,
    switch,
    unmapped,
)

NAME = "axolotl"
MARKS = ("base_model", "sequence_len", "micro_batch_size", "sample_packing", "adapter", "datasets")
SHAPES = (
    *("alpaca", "chat_template", "completion", "sharegpt", "input_output", "pretrain"),
    *("alpaca_chat.load_qa", "gpteacher", "oasst", "chat_template.default"),
)
LATER = ("evals_per_epoch", "saves_per_epoch")
CACHED = needless("tokens are cached by what decides them")


def draft_of(given: dict[str, Any], ranks: int) -> Draft:
    def finish(draft: Draft) -> None:
        defaults(draft)
        batch(draft, "micro_batch_size", "gradient_accumulation_steps", ranks)
        if draft.values.setdefault("finetuning_type", "full") == "full":
            for name in [name for name in draft.values if name.startswith("lora_")]:
                del draft.values[name]
                draft.note(draft.why[name], "needless", "no adapter is asked for")

    return drafted(given, KEYS, finish)


def adapter(draft: Draft, key: str, value: Any) -> None:
    if value in ("lora", "qlora"):
        draft.say(key, "finetuning_type", "lora")
    elif value:
        draft.note(key, "unmapped", f"there is no adapter {value!r}; lora takes its place")
        draft.values["finetuning_type"] = "lora"
    else:
        draft.note(key, "needless", "it is off")


def bits(base: str) -> Handler:
    def handle(draft: Draft, key: str, value: Any) -> None:
        if value:
            draft.say(key, "lora_base", base)
        else:
            draft.note(key, "needless", "it is off")

    return handle


def datasets(draft: Draft, key: str, value: Any) -> None:
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


def linear(draft: Draft, key: str, value: Any) -> None:
    if value:
        draft.say(key, "lora_targets", "all-linear")


def packing(draft: Draft, key: str, value: Any) -> None:
    """Rows of ``sequence_len`` out of the whole epoch, documents kept apart."""
    if not value:
        draft.note(key, "needless", "it is off")
        return
    row = draft.given.get("sequence_len")
    draft.use(key, "packed_epoch", {"row_tokens": int(row)} if row else None)
    draft.plan.append("document_attention")


def validation(draft: Draft, key: str, value: Any) -> None:
    number = float(value or 0)
    draft.say(key, "held_out", number if number < 1 else int(number))


def everything(draft: Draft, key: str, value: Any) -> None:
    words = "loss is on the assistant's tokens; of text records on all"
    draft.note(key, "unmapped" if value else "needless", words)


def writer(name: str) -> Handler:
    def handle(draft: Draft, key: str, value: Any) -> None:
        if value:
            draft.say(key, "log_to", [name])
        else:
            draft.note(key, "needless", "it is off")

    return handle


KEYS: dict[str, Handler] = TRAINING | {
    "base_model": named("model"),
    "base_model_config": needless("the config lies with the model"),
    "model_type": needless("the config says it"),
    "tokenizer_type": needless("tokenizer.json says it"),
    "tokenizer_config": named("tokenizer"),
    "trust_remote_code": needless("code of a model's folder never runs"),
    "is_llama_derived_model": needless("the config says it"),
    "load_in_8bit": bits("int8"),
    "load_in_4bit": bits("nf4"),
    "strict": needless("keys of a recipe are always checked"),
    "datasets": datasets,
    "test_datasets": unmapped("give its file as held_out"),
    "dataset_prepared_path": CACHED,
    "dataset_processes": CACHED,
    "shuffle_merged_datasets": needless("records of all sources are shuffled together"),
    "chat_template": needless("the tokenizer's own template, or a near one"),
    "val_set_size": validation,
    "adapter": adapter,
    "lora_model_dir": unmapped("a run begins without an adapter: merge it first"),
    "lora_r": named("lora_rank", int),
    "lora_alpha": named("lora_alpha", int),
    "lora_dropout": named("lora_dropout", float),
    "lora_target_modules": named("lora_targets", targets),
    "lora_target_linear": linear,
    "lora_fan_in_fan_out": needless("weights are (out, in)"),
    "lora_modules_to_save": unmapped("embedding and head stay frozen beside an adapter"),
    "peft_use_dora": named("lora_dora", bool),
    "peft_use_rslora": named("lora_rslora", bool),
    "sequence_len": named("cutoff_len", int),
    "sample_packing": packing,
    "eval_sample_packing": needless("held-out records are laid out as the others"),
    "pad_to_sequence_len": needless("nothing is padded where records are packed"),
    "sample_packing_group_size": needless("rows are packed over the whole epoch"),
    "micro_batch_size": lambda draft, key, value: None,  # in batch()
    "gradient_accumulation_steps": lambda draft, key, value: None,
    "eval_batch_size": needless("16 records at once"),
    "num_epochs": epochs,
    "lr_scheduler": schedule,
    "optimizer": TRAINING["optim"],
    "train_on_inputs": everything,
    "gradient_checkpointing": recompute,
    "flash_attention": needless("document_attention chooses the kernel"),
    "flash_attn_cross_entropy": needless("labelled_token_loss is the plan's"),
    "xformers_attention": needless("document_attention chooses the kernel"),
    "sdp_attention": needless("document_attention chooses the kernel"),
    "liger_rms_norm": switch("fused_layers"),
    "liger_rope": switch("fused_layers"),
    "liger_glu_activation": switch("fused_layers"),
    "liger_swiglu": switch("fused_layers"),
    "liger_fused_linear_cross_entropy": switch("labelled_token_loss"),
    "plugins": needless("their keys are read one by one"),
    "wandb_project": writer("wandb"),
    "wandb_entity": needless("runs are written offline"),
    "wandb_watch": needless("runs are written offline"),
    "wandb_name": needless("a run is known by its folder"),
    "wandb_log_model": unmapped("hasten uploads nothing"),
    "mlflow_tracking_uri": writer("mlflow"),
    "use_tensorboard": writer("tensorboard"),
    "fsdp": sharding.words,
    "fsdp_config": sharding.config(lambda given: True),
    "fsdp_version": needless("fsdp2 is PyTorch's second one"),
    "special_tokens": unmapped("the tokenizer's own tokens are used"),
    "tokens": unmapped("the tokenizer gets no new tokens"),
    "early_stopping_patience": named("patience", int),
    "evals_per_epoch": unmapped("say eval_every in steps; `hasten doctor` says how many there are"),
    "saves_per_epoch": unmapped("say checkpoint_every: dynamic, or a number of steps"),
    "local_rank": needless("the starter says it"),
    "debug": needless("it prints more there"),
}
