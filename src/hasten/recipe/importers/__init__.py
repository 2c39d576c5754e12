"""Imports other tools' configurations as recipes; `FORMATS` lists the tools.

    imported = read(Path("sft.yaml"))   # the file's keys identify the tool
    imported.values                     # the recipe's keys
    imported.rows                       # the use of every key of the file

DeepSpeed is the last format. Nothing in such a file is executed. A file without the
marks of any format is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hasten.data.conversation import columns_of
from hasten.errors import InputError
from hasten.foreign_files import parse_json, read_bounded
from hasten.formatting import did_you_mean
from hasten.parts.distributed.deepspeed_config import (
    TOP,
    MappedConfig,
    defaults_of,
    is_comment,
    read_config,
    schedule_differences,
    section_enabled,
)
from hasten.recipe.importers import (
    accelerate,
    axolotl,
    llama_factory,
    llama_factory_v1,
    ms_swift,
    sharding,
    training_arguments,
)
from hasten.recipe.importers.draft import LEFT_OUT, Fate, ImportedKey, RecipeDraft, is_off
from hasten.recipe.importers.refusals import refuse_other_training
from hasten.recipe.schema import Recipe, recipe_from
from hasten.recipe.shorthands import meaning_of, settings_of
from hasten.recipe.yaml_reader import (
    LARGEST_FILE,
    check_keys,
    one_line,
    read_yaml,
)

FORMATS: tuple[ModuleType, ...] = (
    llama_factory_v1,
    llama_factory,
    axolotl,
    ms_swift,
    accelerate,
    training_arguments,
)
DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
MOST_KEYS, DEEPEST = 2000, 12
MOST_FILES, SHOWN_FILES = 100, 5  # files that are read, and shown, if the path is a folder
# Largest share of unknown keys. It is lower for tools whose marks are common words.
UNKNOWN_SHARE = 0.5
UNKNOWN_SHARES = {training_arguments: 0.2, ms_swift: 0.2}
MISSING = {"model": "a model", "dataset": "examples", "max_steps": "an end"}


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe from another tool's file, with the use of each of its keys."""

    format: str
    values: dict[str, Any]
    rows: tuple[ImportedKey, ...]
    why: dict[str, str]
    plan_why: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Keys that a recipe needs and the file doesn't have."""
        missing_keys = [key for key in ("model", "dataset") if key not in self.values]
        ends = {"max_steps", "epochs", "max_tokens"} & set(self.values)
        return missing_keys if ends else [*missing_keys, "max_steps"]

    def check(self, origin: str) -> Recipe:
        """Reads the recipe as a command would, with placeholders for missing keys.

        Raises:
            InputError: two keys exclude each other, or a value is invalid.
        """
        filled = {"model": "m", "dataset": "d", "max_steps": 1}
        return recipe_from({**{k: filled[k] for k in self.missing}, **self.values}, origin)

    def to_yaml(self, source: str) -> str:
        """Returns the recipe's text; comments name the source of each line.

        Raises:
            InputError: a text in the file would become another key.
        """
        lines = [f"# from {one_line(source)} ({self.format})"]
        for key, value in self.values.items():
            text = yaml.safe_dump({key: value}, sort_keys=False, width=100).rstrip()
            source_key = self.why.get(key, key)
            comment = f"# {one_line(source_key)}" if source_key != key else ""
            if key == "plan":
                lines += [f"# {one_line(explanation)}" for explanation in self.plan_why]
            if comment and "\n" in text:
                lines += [comment, text]
            else:
                lines.append(f"{text}  {comment}".rstrip())
        lines += [f"# {key}: ...  # missing: {MISSING[key]}" for key in self.missing]
        unsupported_rows = [row for row in self.rows if row.fate in ("unmapped", "contradicts")]
        lines += [""] if unsupported_rows else []
        lines += [
            f"# not taken over, {one_line(f'{row.key}: {row.explanation}')}"
            for row in unsupported_rows
        ]
        return check_keys("\n".join(lines) + "\n", list(self.values))


def read(path: Path, ranks: int = 1) -> ImportedRecipe:
    """Converts a file of another trainer into a recipe.

    Args:
        path: YAML or JSON.
        ranks: number of processes, for formats with a batch size for each device.

    Raises:
        InputError: a folder, no such file, too large or too deep, or of no known format. Also a
            training that hasten doesn't have.
    """
    if path.is_dir():
        raise InputError(_folder_advice(path))
    content = _content(path)
    if not isinstance(content, dict) or not content:
        raise InputError(
            f"{path} has no keys: give a configuration file of another trainer; write the "
            "options of a command line as YAML, `key: value`"
        )
    source = {str(key): value for key, value in content.items()}
    if _count(source) > MOST_KEYS:
        raise InputError(f"{path} has more than {MOST_KEYS} values; that is no configuration")
    if _is_deepspeed(source):
        return _deepspeed(path, source)
    refuse_other_training(path, source)
    form = _format(path, source)
    draft: RecipeDraft = form.draft_of(RecipeDraft(source, form.NAME, path.parent), ranks)
    sharding.resolve_sharding(draft)
    # Reports columns that have no common shape, because they would stop the training.
    sources = draft.values.get("dataset")
    places = [s for s in sources if isinstance(s, dict)] if isinstance(sources, list) else []
    for section in (draft.values, *places):
        if "columns" not in section:
            continue
        try:
            columns_of(section["columns"], draft.values.get("stage", "sft"))
        except InputError as error:
            draft.row("columns", section.pop("columns"), "unmapped", str(error))
            draft.why.pop("columns", None)
    _beside_deepspeed(draft, ranks)
    return _finished(draft.tool, draft, ranks)


def _folder_advice(folder: Path) -> str:
    """Returns the refusal of a folder, with the configuration files that it holds."""
    files = sorted(f for f in folder.iterdir() if f.suffix in (".yaml", ".yml", ".json"))
    names = [file.name for file in files[:MOST_FILES] if file.is_file() and _is_known(file)]
    if not names:
        tools = ", ".join(form.NAME for form in FORMATS)
        return f"{folder} is a folder, and holds no configuration of {tools} or DeepSpeed: give one"
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    shown = ", ".join(names[:SHOWN_FILES])
    return f"{folder} is a folder: give one of its configuration files ({shown}{more})"


def _is_known(path: Path) -> bool:
    """Returns True if a file is a configuration of a supported tool."""
    try:
        content = _content(path)
        if not isinstance(content, dict) or not content:
            return False
        source = {str(key): value for key, value in content.items()}
        return _is_deepspeed(source) or bool(_format(path, source))
    except InputError:
        return False


def _content(path: Path) -> Any:
    """Reads a file, first as JSON, then as YAML.

    Raises:
        InputError: no such file, too large, or neither JSON nor YAML.
    """
    text = read_bounded(path, LARGEST_FILE, "configuration").decode("utf-8", "replace")
    try:  # JSON may have tabs, which YAML refuses
        return parse_json(text, str(path))
    except InputError:
        if path.suffix == ".json":
            raise
    return read_yaml(text, str(path))


def _format(path: Path, source: dict[str, Any]) -> ModuleType:
    """Returns the tool with marks in the file that has most of the file's keys.

    Raises:
        InputError: no tool, or one that hasten doesn't support.
    """
    scores = [(_marks(f, source), sum(key in f.KEYS for key in source), f) for f in FORMATS]
    marks, _, best = max(scores, key=lambda score: (score[0] > 0, score[1], score[0]))
    names = ", ".join(f.NAME for f in FORMATS)
    if not marks:
        raise InputError(
            f"{path} is no configuration of {names} or DeepSpeed: none has such keys as "
            f"{', '.join(list(source)[:3])}"
        )
    unknown = [key for key, value in source.items() if key not in best.KEYS and not is_off(value)]
    if len(unknown) > max(1, UNKNOWN_SHARES.get(best, UNKNOWN_SHARE) * len(source)):
        raise InputError(
            f"{path}: hasten doesn't know which tool this file is of: {', '.join(unknown[:3])} "
            f"are no keys of {best.NAME}, which is nearest; write a recipe with `hasten init`"
        )
    return best


def _marks(form: ModuleType, source: dict[str, Any]) -> int:
    marks = form.MARKS
    if form is training_arguments:
        marks = (*marks, *training_arguments.TRL_MARKS, *training_arguments.SCRIPT_MARKS)
    count = sum(mark in source for mark in marks)
    return count if count >= getattr(form, "FEWEST_MARKS", 1) else 0


def _beside_deepspeed(draft: RecipeDraft, ranks: int) -> None:
    """Removes settings from the plan that a DeepSpeed configuration also has.

    If both have a number format, the configuration's is used, or they contradict. A
    configuration with an unsupported key is left out, and reported.
    """
    config: Any = draft.values.get("deepspeed")
    if config is None:
        return
    source, name = (Path(config), config) if isinstance(config, str) else (config, "deepspeed")
    key = draft.why["deepspeed"]
    try:
        settings = read_config(source) if isinstance(source, Path) else source
    except ValueError as error:
        raise InputError(str(error)) from error
    try:
        batch = {"global_batch_size": draft.values.get("global_batch_size")}
        mapped_config = meaning_of(settings, {"nproc": ranks, **batch}, [])
        problems = [f"{row.key}: {row.explanation}" for row in mapped_config.refused]
    except ValueError as error:
        problems, mapped_config, settings = [str(error)], MappedConfig(), {}
    if problems:
        draft.withdraw("deepspeed", f"left out, since {problems[0]}", "unmapped")
        return
    taken = {
        "gradient_accumulation": mapped_config.micro_batch,
        "activation_checkpointing": mapped_config.recompute,
        "fsdp2": mapped_config.stage,
    }
    drop = {technique for technique, is_configured in taken.items() if is_configured}
    draft.plan = [e for e in draft.plan if (e if isinstance(e, str) else next(iter(e))) not in drop]
    if mapped_config.stage:
        draft.withdraw("layout", f"in {name}")
    decided = settings_of(mapped_config)
    for setting in decided:
        if ": " in draft.why.get(setting, "") or setting == "adam_betas":
            draft.withdraw(setting, f"in {name}")
        elif (
            setting == "lr_schedule"
            and draft.values.get(setting) != mapped_config.settings[setting]
        ):
            explanation = f"the scheduler of {name} is used, as in Trainer"
            draft.withdraw(setting, explanation, "contradicts")
    _deepspeed_defaults(draft, settings, name)
    _schedule_rows(draft, settings)
    number_format = next(
        (f for f in ("fp16", "bf16") if section_enabled(settings, f) is True), None
    )
    _one_format(draft, number_format, name, key)


def _deepspeed_defaults(draft: RecipeDraft, settings: Mapping[str, Any], name: str) -> None:
    """Sets DeepSpeed's defaults, since DeepSpeed ignores the trainer's own settings."""
    for key, default in defaults_of(settings).items():
        text = json.dumps(default)
        explanation = f"{name} has no such key, and DeepSpeed takes {text}, which is used"
        if ": " not in draft.why.get(key, ": ") and draft.values[key] != default:
            draft.withdraw(key, explanation, "contradicts")
        draft.values[key], draft.why[key] = default, f"{key}: DeepSpeed's default"
        draft.row(key, LEFT_OUT, "mapped", f"{key}: {text} (DeepSpeed's default)")


def _schedule_rows(draft: RecipeDraft, settings: Mapping[str, Any]) -> None:
    """Adds a row for each key of a DeepSpeed schedule that isn't followed."""
    for key, explanation in schedule_differences(settings):
        timing = settings["scheduler"].get("params") or {}
        draft.row(key, timing.get(key.rpartition(".")[2], "left out"), "unmapped", explanation)


def _one_format(draft: RecipeDraft, number_format: str | None, name: str, key: str) -> None:
    """Removes the number formats that a DeepSpeed configuration decides."""
    fate: Fate = "needless" if number_format == "bf16" else "contradicts"
    draft.withdraw("weights_dtype", f"{name} decides the format of weights", fate)
    entry = next((e for e in draft.plan if isinstance(e, dict) and "autocast" in e), None)
    if number_format is None or entry is None:
        return
    draft.plan.remove(entry)
    draft.values["on_obstacle"] = "skip"  # as `_finished` does with a plan
    plan_format = entry["autocast"]["dtype"]
    for index, row in enumerate(draft.rows):
        if row.explanation.startswith("plan: autocast"):
            same = replace(row, explanation=f"in {name}")
            other = replace(
                row, fate="contradicts", explanation=f"{name} says {number_format}, which is kept"
            )
            draft.rows[index] = (
                same if plan_format == number_format or row.value == LEFT_OUT else other
            )
    draft.plan_why = [
        explanation for explanation in draft.plan_why if not explanation.startswith("autocast")
    ]


def _finished(name: str, draft: RecipeDraft, ranks: int) -> ImportedRecipe:
    values = dict(draft.values)
    if ranks > 1 or not values:  # a recipe must have a key
        values.setdefault("nproc", ranks)
    if draft.plan:
        values["plan"] = draft.plan
        values["on_obstacle"] = "skip"  # reports and skips what this machine doesn't support
    used = draft.techniques
    why = tuple(explanation for explanation in draft.plan_why if explanation.split()[0] in used)
    return ImportedRecipe(name, values, tuple(draft.rows), draft.why, why)


def _is_deepspeed(source: dict[str, Any]) -> bool:
    """Returns True if most keys are DeepSpeed's, and one is in every DeepSpeed configuration."""
    recognised = sum(key in TOP or is_comment(key) for key in source)
    marked = bool(set(DEEPSPEED) & set(source))
    return recognised >= (len(source) / 2 if marked else max(2, len(source) - 1))


def _deepspeed(path: Path, source: dict[str, Any]) -> ImportedRecipe:
    """Imports a DeepSpeed configuration: the recipe names the file.

    If the file has top-level keys that DeepSpeed doesn't know, the recipe contains the other
    settings instead of the file's name.
    """
    draft = RecipeDraft(source, "DeepSpeed", path.parent)
    recognised = {key: value for key, value in source.items() if key in TOP or is_comment(key)}
    draft.values["deepspeed"] = str(path) if recognised == source else recognised
    for key in source:
        if key in recognised:
            draft.note(key, "mapped", "read from the file itself (deepspeed)")
        else:
            explanation = f"DeepSpeed doesn't know this key{did_you_mean(key, TOP)}"
            draft.note(key, "unmapped", explanation)
    try:
        _deepspeed_defaults(draft, recognised, "DeepSpeed")
        _schedule_rows(draft, recognised)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if "optimizer" in recognised and not recognised.get("scheduler"):
        explanation = "DeepSpeed keeps the rate without a scheduler; here lr_schedule changes it"
        draft.row("scheduler", LEFT_OUT, "unmapped", explanation)
    return _finished("DeepSpeed", draft, 1)


def _count(value: Any, depth: int = 0) -> int:
    """Returns the number of nested values; more than the limit if the nesting is too deep."""
    if depth > DEEPEST:
        return MOST_KEYS + 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_count(one, depth + 1) for one in inner)
