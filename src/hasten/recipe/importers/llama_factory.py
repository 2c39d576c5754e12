"""LLaMA-Factory's YAML for training on text, answers or preferences (``examples/train_*``).

Meanings and defaults: LLaMA-Factory's ``hparams/*_args.py``, ``data/loader.py`` and
``data/processor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    LEFT_OUT,
    ROWS,
    Handler,
    RecipeDraft,
    drafted,
    is_off,
    names_of,
    positive,
    switch,
    table,
    whole_number,
)
from hasten.recipe.importers.preferences import KEYS as PREFERENCE_KEYS
from hasten.recipe.importers.preferences import is_preference_training, take_preferences
from hasten.recipe.importers.training import (
    CUT_TEXTS,
    DEFAULTS,
    TRAINING,
    batch,
    four_bits,
    lora_targets,
    packed_rows,
    pure,
    quantised,
    resolve_batch,
    resolve_lora,
    say_sources,
    share_or_count,
)

NAME = "LLaMA-Factory"
MARKS = (
    *("stage", "finetuning_type", "model_name_or_path", "template", "cutoff_len", "dataset_dir"),
    *("lora_target", "quantization_bit", "neat_packing", "preprocessing_num_workers", "val_size"),
    *("overwrite_cache", "max_samples", "plot_loss", "export_dir", "infer_backend", "pref_loss"),
)
CUTOFF = 2048  # tokens
FEWEST_MARKS = 2
TOOL_DEFAULTS = {
    **DEFAULTS,
    "cutoff_len": CUTOFF,
    "finetuning_type": "lora",
    "do_train": False,
    "disable_gradient_checkpointing": False,
}
# LLaMA-Factory's template names, and hasten's template that renders the same text.
TEMPLATES: Mapping[str, str] = ROWS["llama_factory"]["templates"]
WITHOUT_THOUGHTS = dict.fromkeys(("qwen3", "qwen3_5", "qwen3_6"), "qwen3-empty-thoughts")
OTHER_TOOLS = ("qwen3_5", "qwen3_5_nothink", "qwen3_6")  # templates with another text for tools


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    source = draft.source

    def finish(draft: RecipeDraft) -> None:
        if not is_preference_training(source):
            packing(draft)
        passes = ("gradient_accumulation_steps", 1)
        batch(draft, ("per_device_train_batch_size", 8), passes, ranks)
        resolve_batch(draft)
        long_examples(draft)
        defaults = {
            "lora_rank": ("lora_rank", 8),
            "lora_target": ("lora_targets", "all-linear"),
            "lora_alpha": ("lora_alpha", 2 * draft.values.get("lora_rank", 8)),
        }
        resolve_lora(draft, defaults, "no adapter is asked for")
        take_preferences(draft)
        if source.get("stage") != "pt" and source.get("template") is None:
            explanation = (
                "no template: the dataset's own text, or the tokenizer's chat template here"
            )
            draft.row("template", None, "unmapped", explanation)

    return drafted(draft, KEYS, finish, defaults=TOOL_DEFAULTS)


def packing(draft: RecipeDraft) -> None:
    """Maps packing: on by request for dialogues, and by default for texts."""
    source = draft.source
    key = "neat_packing" if source.get("neat_packing") is True else "packing"
    texts = source.get("stage") == "pt"
    requested = source.get(key)
    if not (requested is True or (texts and requested is None)):
        return
    cutoff = whole_number(draft.setting("cutoff_len", CUTOFF))
    draft.at_default = requested is None
    if requested is True:  # as in LLaMA-Factory's DataArguments
        cutoff -= 1
        draft.values["cutoff_len"] = cutoff
        draft.why["cutoff_len"] = "cutoff_len, one less with packing"
    packed_rows(draft, key, cutoff)
    draft.at_default = False
    if key == "packing":
        explanation = (
            "there examples of a row attend to each other; here each attends to itself "
            "(as neat_packing)"
        )
        draft.row(key, source.get(key, LEFT_OUT), "unmapped", explanation)


def long_examples(draft: RecipeDraft) -> None:
    """Adds a row on examples that are longer than ``cutoff_len``, if they are cut otherwise."""
    explanation = "of a longer example each question and answer is shortened there; here its end"
    if draft.source.get("stage") == "pt":
        explanation = CUT_TEXTS
    elif is_preference_training(draft.source):
        explanation = "of a longer pair prompt and answers are shortened there; here the answers"
    elif not is_off(draft.source.get("mask_history")):
        explanation = (
            "of a longer dialogue the last turns are kept there (mask_history); here its end is "
            "cut, and without its last answer it is left out"
        )
    if draft.source.get("stage") != "pt" or not draft.row_tokens:
        draft.row("cutoff_len", draft.source.get("cutoff_len", LEFT_OUT), "unmapped", explanation)


def stage(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Notes the stage; files with an unsupported stage have been refused."""
    draft.note(key, "mapped", "examples with a loss mask, text, or preferences")


def trains(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is True:
        draft.note(key, "mapped", "hasten train trains")
    else:
        draft.note(key, "unmapped", "without it nothing is trained there; hasten train trains")


def what_learns(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting is not None:
        draft.say(key, "finetuning_type", setting)
        draft.values["finetuning_type"] = setting


def datasets(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps names to entries of dataset_info.json; a name with a file suffix is a file.

    ``max_samples`` takes only the first examples of each data set.
    """
    names, folder = names_of(setting), str(draft.source.get("dataset_dir") or "data")
    if folder == "ONLINE" or folder.startswith("REMOTE:"):
        explanation = "data sets by a hub's list: name them as owner/name"
        draft.row("dataset_dir", folder, "unmapped", explanation)
    listing = Path(folder) / "dataset_info.json"
    sources: list[Any] = [n if Path(n).suffix else f"{listing}:{n}" for n in names]
    if folder == "ONLINE":
        sources = [*names]
    most = draft.source.get("max_samples")
    if most is not None:
        sources = [{"path": path, "max_examples": whole_number(most)} for path in sources]
        draft.note("max_samples", "mapped", "max_examples of each data set, the first ones")
    say_sources(draft, key, sources)


def template(draft: RecipeDraft, key: str, setting: Any) -> None:
    chat_template = TEMPLATES.get(str(setting))
    if draft.source.get("enable_thinking") is False:  # LLaMA-Factory's default is true
        chat_template = WITHOUT_THOUGHTS.get(str(setting), chat_template)
    if chat_template is not None:
        draft.say(key, "chat_template", chat_template)
        if setting in OTHER_TOOLS:
            draft.note(
                key, "unmapped", f"tools are written in another way there than in {chat_template}"
            )
    elif setting is not None:
        explanation = (
            f"hasten has no template {setting!r}: give it as a .jinja file (chat_template)"
        )
        draft.note(key, "unmapped", explanation)


def stored_activations(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a key that switches activation checkpointing off."""
    if setting is not True:
        draft.use(key, "activation_checkpointing")
    else:
        draft.note(key, "mapped", "nothing is recomputed")


def thinking(draft: RecipeDraft, key: str, setting: Any) -> None:
    thoughts = ("deepseekr1", "keye_vl") if setting is False else ()
    is_needless = draft.source.get("template") not in thoughts
    explanation = "the chat template decides on thoughts"
    draft.note(key, "needless" if is_needless else "unmapped", explanation)


def eval_data(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the split for eval data; with ``eval_dataset``, nothing is split off."""
    if draft.source.get("eval_dataset"):
        draft.note(key, "needless", "eval_dataset is given")
    else:
        share_or_count(draft, key, setting)


def eval_dataset(draft: RecipeDraft, key: str, setting: Any) -> None:
    names = names_of(setting)
    if names and draft.source.get("max_samples") is not None:
        explanation = "eval_dataset has as many there; here all of its examples are evaluated"
        draft.row("max_samples", draft.source["max_samples"], "unmapped", explanation)
    if len(names) == 1:
        folder = Path(str(draft.source.get("dataset_dir") or "data"))
        path = names[0] if Path(names[0]).suffix else f"{folder / 'dataset_info.json'}:{names[0]}"
        draft.say(key, "eval_data", path)
    elif names:
        draft.note(key, "unmapped", "eval_data is one file: join them")


KEYS: dict[str, Handler] = (
    TRAINING
    | PREFERENCE_KEYS
    | table("llama_factory")
    | {
        "stage": stage,
        "do_train": trains,
        "finetuning_type": what_learns,
        "lora_target": lora_targets("all"),
        "quantization_bit": quantised,
        "quantization_type": four_bits,
        "dataset": datasets,
        "template": template,
        "preprocessing_num_workers": positive("data_workers"),
        "val_size": eval_data,
        "eval_dataset": eval_dataset,
        "early_stopping_steps": positive("patience"),
        "disable_gradient_checkpointing": stored_activations,
        "pure_bf16": pure("bf16"),
        "use_muon": switch("muon"),
        "fp8": switch("float8"),
        "enable_thinking": thinking,
        "fsdp": sharding.fsdp_options,
        "fsdp_config": sharding.config(lambda settings: bool(settings.get("fsdp"))),
    }
)
