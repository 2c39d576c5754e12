"""axolotl's YAML for full and adapter training of language models, also on preferences.

Meanings and defaults: axolotl's ``utils/schemas``, ``core/builders/base.py`` and
``utils/trainer.py``; for preferences ``core/builders/rl.py`` and ``prompt_strategies/dpo``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    ROWS,
    Handler,
    RecipeDraft,
    default_of,
    drafted,
    is_off,
    named,
    needless,
    positive,
    table,
    whole_number,
)
from hasten.recipe.importers.preferences import KEYS as PREFERENCE_KEYS
from hasten.recipe.importers.preferences import is_preference_training, take_preferences
from hasten.recipe.importers.training import (
    DEFAULTS,
    TRAINING,
    activation_checkpointing,
    batch,
    epochs,
    examples_kept,
    four_bits,
    packed_rows,
    per_epoch,
    pure,
    resolve_batch,
    resolve_lora,
    schedule,
    share_or_count,
)

NAME = "axolotl"
MARKS = (
    *("base_model", "sequence_len", "micro_batch_size", "sample_packing", "adapter", "num_epochs"),
    *("val_set_size", "dataset_prepared_path", "lora_r", "special_tokens", "lora_target_linear"),
    *("wandb_project", "pretraining_dataset", "flash_attention"),
)
SEQUENCE = 512  # tokens
WARMUP_SHARE, WARMUP_STEPS = 0.03, 100  # axolotl's default warm-up: the smaller of the two
FEWEST_MARKS = 2
TOOL_DEFAULTS = {
    **{key: DEFAULTS[key] for key in ("adam_beta1|adam_beta2", "seed")},
    "num_epochs|max_steps": 1,
    "lr_scheduler": "cosine",
    "sequence_len": SEQUENCE,
    "excess_length_strategy": "drop",
    "bf16|fp16|bfloat16|float16|float32": "auto",
    "adapter": "",
}


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    source = draft.source

    def finish(draft: RecipeDraft) -> None:
        size, total = source.get("micro_batch_size"), source.get("batch_size")
        passes = whole_number(total) // whole_number(size or 1) if total else 1
        batch(draft, ("micro_batch_size", 1), ("gradient_accumulation_steps", passes), ranks)
        if total and source.get("gradient_accumulation_steps") is None:
            draft.note("batch_size", "mapped", "examples or rows of a step on a rank")
        if source.get("warmup_ratio") is None and source.get("warmup_steps") is None:
            default_warmup(draft)
        resolve_batch(draft)
        take_preferences(draft)
        if source.get("learning_rate") is None:
            rate = default_of("learning_rate")
            draft.row("learning_rate", None, "unmapped", f"axolotl requires it; {rate} here")
        long_texts(draft)
        if draft.values.get("finetuning_type") == "lora" and "lora_targets" not in draft.values:
            explanation = (
                "left out, so PEFT takes its list for the architecture; lora_targets: auto here"
            )
            draft.row("lora_target_modules", None, "unmapped", explanation)
        draft.values.setdefault("finetuning_type", "full")
        resolver = "peft" if is_off(source.get("lora_target_linear")) else "linear_names"
        resolve_lora(draft, {}, "no adapter is asked for", resolver)

    return drafted(draft, KEYS, finish, defaults=TOOL_DEFAULTS)


def default_warmup(draft: RecipeDraft) -> None:
    """Sets axolotl's default: 3 % of all steps, 100 at most."""
    draft.at_default, steps = True, draft.values.get("max_steps")
    if steps:
        number = min(int(WARMUP_SHARE * steps), WARMUP_STEPS)
        if number:
            draft.say("warmup_ratio", "warmup_steps", max(number, 2))
    else:
        draft.say("warmup_ratio", "warmup_steps", WARMUP_SHARE)
        explanation = (
            f"at most {WARMUP_STEPS} steps there: beyond 3,334 steps set warmup_steps: 100"
        )
        draft.note("warmup_steps", "unmapped", explanation)
    draft.at_default = False


def warmup(draft: RecipeDraft, key: str, setting: Any) -> None:
    number = float(setting or 0)
    if number == 1:  # as in its trainer builder
        draft.say(key, "warmup_steps", 2)
    else:
        TRAINING["warmup_steps"](draft, key, setting)


def adapter(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps LoRA; files with another adapter have been refused."""
    if setting in ("lora", "qlora"):
        draft.say(key, "finetuning_type", "lora")


# Data sets.

# Types whose examples are recognised by their columns.
SHAPES = ("chat_template", "completion", "sharegpt", "pretrain")
FIELDS = {
    "field": "text",
    "field_messages": "messages",
    "field_tools": "tools",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "text_column": "text",
}
OF_TURNS = {"role": "role_tag", "content": "content_tag"}
SHAREGPT = {"role": "from", "content": "value"}
NO_MATTER = ("ds_type", "trust_remote_code", "preprocess_shards", "data_files", "type", "path")
AS_IT_IS: Mapping[str, tuple[Any, ...]] = {  # settings that equal hasten's behaviour
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "split": ("train",),
    "name": ("default",),
    "conversation": ("chatml", None),
    "input_transform": (None,),
}
USUAL_ROLES = {
    "assistant": {"assistant", "gpt", "model"},
    "user": {"user", "human"},
    "system": {"system"},
    "tool": {"tool"},
}
PART = re.compile(r"[\w.-]+")  # a split without a slice


def datasets(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps each entry to a source; further keys of an entry have a row of their own."""
    entries = [setting] if isinstance(setting, str | Mapping) else list(setting or ())
    sources: list[Any] = []
    for number, entry in enumerate(entries):
        entry_key = f"{key}[{number}]"
        if isinstance(entry, str):
            sources.append(entry)
        elif isinstance(entry, Mapping):
            sources += _sources(draft, entry_key, entry)
        else:
            draft.row(entry_key, entry, "unmapped", "it names no data set")
    if len(sources) == 1 and isinstance(sources[0], dict):
        draft.say(key, "columns", sources[0]["columns"])
        sources = [sources[0]["path"]]
    if sources:
        draft.say(key, "dataset", sources[0] if sources == [str(sources[0])] else sources)


def _sources(draft: RecipeDraft, entry_key: str, entry: Mapping[str, Any]) -> list[Any]:  # noqa: C901  # a clause for each kind of source
    columns: dict[str, str] = {}
    for name, part_setting in entry.items():
        if name in ("name", "split") and _hub(entry):
            _configuration(draft, f"{entry_key}.{name}", name, part_setting)
        elif name == "type":
            _type(draft, f"{entry_key}.type", part_setting, entry, columns)
        elif name in FIELDS and isinstance(part_setting, str):
            if part_setting not in (FIELDS[name], "conversations"):
                columns[FIELDS[name]] = part_setting
                draft.row(
                    f"{entry_key}.{name}",
                    part_setting,
                    "mapped",
                    f"columns: {FIELDS[name]}: {part_setting}",
                )
        elif name in ("message_field_role", "message_field_content") and isinstance(
            part_setting, str
        ):
            _turn(draft, f"{entry_key}.{name}", name.rpartition("_")[2], part_setting, columns)
        elif name == "message_field_training" and isinstance(part_setting, str):
            columns["train_tag"] = part_setting
            draft.row(
                f"{entry_key}.{name}", part_setting, "mapped", f"columns: train_tag: {part_setting}"
            )
        elif name == "message_property_mappings" and isinstance(part_setting, Mapping):
            for part, field_name in part_setting.items():
                _turn(draft, f"{entry_key}.{name}.{part}", str(part), str(field_name), columns)
        elif name == "roles" and isinstance(part_setting, Mapping):
            _roles(draft, f"{entry_key}.roles", part_setting, columns)
        elif name == "chat_template":
            template(draft, f"{entry_key}.{name}", part_setting)
        elif name == "roles_to_train" and part_setting == []:
            explanation = "answers without a flag are trained too; there flags alone decide"
            draft.row(f"{entry_key}.{name}", part_setting, "unmapped", explanation)
        elif name in NO_MATTER or part_setting in (
            None,
            False,
            "",
            [],
            {},
            *AS_IT_IS.get(name, ()),
        ):
            continue
        else:
            draft.row(
                f"{entry_key}.{name}",
                part_setting,
                "unmapped",
                "hasten reads a source without this",
            )
    if any(tag in columns for tag in (*OF_TURNS.values(), "user_tag", "train_tag")):
        columns.setdefault("messages", str(entry.get("field_messages") or "messages"))
    files = entry.get("data_files")
    names = [entry.get("path")]
    if files and _hub(entry):
        explanation = "all files of the hub's data set are read: fetch these and name them here"
        draft.row(f"{entry_key}.data_files", files, "unmapped", explanation)
    elif files:
        names = files if isinstance(files, list) else [files]
    paths = [_path(entry, str(name)) for name in names if name]
    return [{"path": path, "columns": columns} if columns else path for path in paths]


def _hub(entry: Mapping[str, Any]) -> bool:
    """Returns True if the path is a hub name: owner/name without such a file here."""
    path = str(entry.get("path") or "")
    return path.count("/") == 1 and not path.startswith((".", "/")) and not Path(path).exists()


def _path(entry: Mapping[str, Any], path: str) -> str:
    """Returns a path, or a hub name with its configuration and split."""
    if not _hub(entry) or path != entry.get("path"):
        return path
    config, split = entry.get("name"), entry.get("split")
    whole_split = split if isinstance(split, str) and PART.fullmatch(split) else None
    if config:
        return f"{path}:{config}:{whole_split or 'train'}"
    return f"{path}:{whole_split}" if whole_split not in (None, "train") else path


def _configuration(draft: RecipeDraft, key: str, name: str, setting: Any) -> None:
    if is_off(setting):
        return
    if name == "split" and not PART.fullmatch(str(setting)):
        explanation = (
            "a part of a split isn't taken: the split train is read; max_examples limits it"
        )
        draft.row(key, setting, "unmapped", explanation)
    elif setting != "train" or name == "name":
        draft.row(key, setting, "mapped", f"dataset: the {name} is part of its name")


def _turn(
    draft: RecipeDraft, key: str, part: str, field_name: str, columns: dict[str, str]
) -> None:
    """Maps the keys for a turn's role and content."""
    tag = OF_TURNS.get(part)
    if SHAREGPT.get(part) == field_name:
        draft.row(key, field_name, "needless", "turns of from and value are recognised")
    elif tag is None and part != field_name:
        draft.row(key, field_name, "unmapped", "a turn is read by its role and content alone")
    elif tag is not None and part != field_name:
        columns[tag] = field_name
        draft.row(key, field_name, "mapped", f"columns: {tag}: {field_name}")


def _roles(draft: RecipeDraft, key: str, roles: Mapping[str, Any], columns: dict[str, str]) -> None:
    for role, names in roles.items():
        role_names = [str(n) for n in names] if isinstance(names, list) else [str(names)]
        other = [n for n in role_names if n not in USUAL_ROLES.get(str(role), ())]
        tag = "observation_tag" if role == "tool" else f"{role}_tag"
        if len(other) == 1 and role in USUAL_ROLES:
            columns[tag] = other[0]
            draft.row(f"{key}.{role}", names, "mapped", f"columns: {tag}: {other[0]}")
        elif other:
            draft.row(f"{key}.{role}", names, "unmapped", "a role has one name more, not several")


def _type(
    draft: RecipeDraft,
    key: str,
    kind: Any,
    entry: Mapping[str, Any],
    columns: dict[str, str],
) -> None:
    """Maps the shape of the examples, and the prompt around them."""
    if is_preference_training(draft.source):
        _preference_type(draft, key, kind, columns)
        return
    if isinstance(kind, Mapping):
        for name, part_setting in kind.items():
            column = FIELDS.get(str(name))
            if column and isinstance(part_setting, str) and name != "field":
                if part_setting != column:
                    columns[column] = part_setting
                draft.row(
                    f"{key}.{name}", part_setting, "mapped", f"columns: {column}: {part_setting}"
                )
            elif not is_off(part_setting):
                explanation = "a format of your own: give a .jinja file as chat_template"
                draft.row(f"{key}.{name}", part_setting, "unmapped", explanation)
        return
    name = str(kind or "").split(":")[0].partition(".")[0]
    if is_off(kind) or name in SHAPES:
        return
    prompt = PROMPTS.get(str(kind))
    if prompt and _types(draft) <= {*PROMPTS, "completion"}:
        draft.say(key, "chat_template", prompt)
    elif prompt:
        explanation = (
            f"other data sets have another prompt: chat_template is one for all, not {prompt}"
        )
        draft.row(key, kind, "unmapped", explanation)
    else:
        explanation = f"hasten has no prompt format {kind!r}: give a .jinja file as chat_template"
        draft.row(key, kind, "unmapped", explanation)


# Types of preferences: the prompt format, and columns that aren't recognised by their names.
OWN_FIELDS = {
    "field_prompt": "instruction",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "output",
    "field_label": "label",
}
PAIR_COLUMNS = {"prompt_pairs": {"instruction": "prompt"}}
RATED_COLUMNS = {
    **{t: {"instruction": "prompt", "output": "completion"} for t in ("prompt_pairs", "ultra")},
    "argilla": {"output": "completion"},
    "intel": {"answer": "completion"},
}
PREFERENCE_FORMATS = {"chatml": "chatml", "llama3": "llama3"}
PREFERENCE_TYPES = (*PREFERENCE_FORMATS, "chat_template", "bradley_terry", "passthrough")


def _preference_type(draft: RecipeDraft, key: str, kind: Any, columns: dict[str, str]) -> None:
    """Maps a type of preferences; its columns are recognised, but for a plain ``prompt``."""
    if isinstance(kind, Mapping):
        for name, part_setting in kind.items():
            if column := OWN_FIELDS.get(str(name)):
                columns[column] = str(part_setting)
                explanation = f"columns: {column}: {part_setting}"
                draft.row(f"{key}.{name}", part_setting, "mapped", explanation)
            elif not is_off(part_setting):
                explanation = "a format of your own: give a .jinja file as chat_template"
                draft.row(f"{key}.{name}", part_setting, "unmapped", explanation)
        return
    family, _, shape = str(kind or "").partition(".")
    if family not in PREFERENCE_TYPES and not is_off(kind):
        explanation = f"hasten doesn't read {kind!r}: write examples of prompt, chosen and rejected"
        draft.row(key, kind, "unmapped", explanation)
    if family in PREFERENCE_FORMATS:
        draft.say(key, "chat_template", PREFERENCE_FORMATS[family])
    columns |= (RATED_COLUMNS if draft.source.get("rl") == "kto" else PAIR_COLUMNS).get(shape, {})


def _types(draft: RecipeDraft) -> set[str]:
    """Returns the prompt types of the data sets."""
    entries = draft.source.get("datasets")
    kinds = [e.get("type") for e in entries or () if isinstance(e, Mapping)]
    return {"own" if isinstance(kind, Mapping) else str(kind) for kind in kinds}


def template(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a name of axolotl's table, ``tokenizer_default``, or ``jinja``."""
    if is_off(setting):
        return
    types = _types(draft)
    if types and types <= {*PROMPTS, "completion"}:
        draft.note(key, "needless", f"examples of type {', '.join(sorted(types))} don't use it")
        return
    base = str(setting).removeprefix("tokenizer_default_fallback_")
    if setting == "tokenizer_default":
        draft.row(key, setting, "mapped", "chat_template: auto, the tokenizer's own")
    elif setting == "jinja":
        draft.row(key, setting, "needless", "chat_template_jinja has the template")
    elif base != setting:
        explanation = f"chat_template: auto, the tokenizer's own; without one it isn't {base}"
        draft.row(key, setting, "unmapped", explanation)
    elif setting in TEMPLATES:
        draft.say(key, "chat_template", TEMPLATES[str(setting)])
        if setting in BUT:
            draft.row(key, setting, "unmapped", BUT[str(setting)])
    else:
        explanation = f"hasten has no chat template {setting!r}: give it as a .jinja file"
        draft.row(key, setting, "unmapped", explanation)


def own_template(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Reports a template's text, which axolotl uses if ``chat_template`` is missing or jinja."""
    if not is_off(setting):
        draft.note(key, "unmapped", "write it into a .jinja file and name it as chat_template")


PROMPTS: Mapping[str, str] = {"alpaca": "alpaca"}  # prompts without a chat template
# Axolotl's template names, and hasten's template that renders the same text.
TEMPLATES: Mapping[str, str] = ROWS["axolotl"]["templates"]
BUT = {  # templates with a difference
    "qwen3_5": "tools are written in another way there",
    "mistral_v2v3": "a system text is left out there; here it is in the first question",
    "mistral_v3_tekken": "a system text is left out there; here it is in the first question",
}


# LoRA, packing, batch.


def targets(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps a list of names, ``all-linear``, or a regular expression."""
    names = setting if isinstance(setting, str) else list(setting or ())
    if not names:
        return
    if names == ["all-linear"] or "all-linear" in names:
        names = "all-linear"
    if draft.source.get("lora_target_linear") is True and names != "all-linear":
        draft.note(key, "mapped", "lora_target_linear adds all linear layers to it")
    else:
        draft.say(key, "lora_targets", names)


def packing(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps packing to rows of ``sequence_len`` tokens with attention within documents."""
    if setting in (True, "true"):
        packed_rows(draft, key, whole_number(draft.setting("sequence_len", SEQUENCE)))


def pretraining(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps texts, which axolotl packs into rows of ``sequence_len`` tokens."""
    datasets(draft, key, setting)
    if not draft.row_tokens and draft.source.get("pretraining_sample_concatenation") is not False:
        packed_rows(draft, key, whole_number(draft.setting("sequence_len", SEQUENCE)))


def too_long(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting in ("drop", "truncate"):
        draft.say(key, "too_long", setting)
    elif setting is not None:
        explanation = "a longer example isn't an error here: too_long is truncate, split or drop"
        draft.note(key, "unmapped", explanation)


def long_texts(draft: RecipeDraft) -> None:
    """Keeps long texts (``completion``, ``pretraining_dataset``): axolotl splits them."""
    types = _types(draft) | ({"completion"} if draft.source.get("pretraining_dataset") else set())
    if draft.values.get("too_long") != "drop" or "completion" not in types:
        return
    if types == {"completion"}:
        draft.withdraw("too_long", "a longer text continues in further examples, as there")
    else:
        explanation = "a longer text continues in further rows there; here it is dropped, too"
        draft.row("excess_length_strategy", "drop", "unmapped", explanation)


def everything(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps training on questions; axolotl doesn't train the markers between turns."""
    if setting is not True:
        draft.note(key, "needless", "loss is on the answers")
        return
    draft.say(key, "loss_on", "everything")
    if not _types(draft) <= {*PROMPTS, "completion", "own"}:
        draft.note(key, "unmapped", "markers between turns are trained too, which aren't there")


def tokens(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Reports special tokens other than the padding token, which isn't trained."""
    others = {k: v for k, v in dict(setting or {}).items() if k != "pad_token" and v}
    if others:
        explanation = f"the tokenizer's own tokens are used, not {', '.join(map(str, others))}"
        draft.note(key, "unmapped", explanation)
    else:
        draft.note(key, "needless", "padding isn't trained")


def saves_per_epoch(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting:
        explanation = "set checkpoint_every: dynamic, or a number of steps"
        draft.note(key, "unmapped", explanation)


def plugins(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps plugins: Liger and cut cross entropy are kernels, others aren't supported."""
    names = [setting] if isinstance(setting, str) else list(setting or ())
    for name in names:
        word = str(name).rpartition(".")[2]
        if "cutcrossentropy" in word.lower():
            draft.use(key, "labelled_token_loss")
        elif "liger" in word.lower() or "kernel" in word.lower():
            draft.row(f"{key}: {word}", name, "needless", "its keys are read one by one")
        else:
            draft.row(f"{key}: {word}", name, "unmapped", "hasten has no such plugin")


def shards(draft: RecipeDraft, key: str, setting: Any) -> None:
    if whole_number(setting or 1) > 1:
        draft.say(key, "layout", "fsdp2")


KEYS: dict[str, Handler] = (
    TRAINING
    | PREFERENCE_KEYS
    | table("axolotl")
    | {
        "warmup_steps": warmup,
        "bnb_config_kwargs": four_bits,
        "datasets": datasets,
        "pretraining_dataset": pretraining,
        "chat_template": template,
        "chat_template_jinja": own_template,
        "val_set_size": share_or_count,
        "excess_length_strategy": too_long,
        "adapter": adapter,
        "lora_target_modules": targets,
        "sample_packing": packing,
        "batch_flattening": examples_kept,
        "num_epochs": epochs,
        "lr_scheduler": schedule,
        "optimizer": TRAINING["optim"],
        "train_on_inputs": everything,
        "gradient_checkpointing": activation_checkpointing,
        "bfloat16": pure("bf16"),
        "float16": pure("fp16"),
        "float32": needless("weights are float32"),
        "special_tokens": tokens,
        "early_stopping_patience": positive("patience"),
        "evals_per_epoch": per_epoch,
        "saves_per_epoch": saves_per_epoch,
        "plugins": plugins,
        "dp_shard_size": shards,
        "tokenizer_config": named("tokenizer"),
        "fsdp": sharding.fsdp_options,
        "fsdp_config": sharding.config(lambda settings: True),
    }
)
