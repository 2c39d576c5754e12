"""Other trainers' files as recipes: LLaMA-Factory, axolotl, accelerate, Hugging Face, DeepSpeed.

    found = read(Path("sft.yaml"))   # which tool it is of is recognised by its keys
    found.values                     # the recipe's keys
    found.rows                       # what became of every key of the file

Nothing in such a file is executed, and a file without one of the marks of a format is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hasten.errors import InputError
from hasten.parts.distributed.deepspeed_config import read_config, section_enabled
from hasten.recipe.importers import (
    accelerate,
    axolotl,
    llama_factory,
    sharding,
    training_arguments,
)
from hasten.recipe.importers.draft import ImportedKey, RecipeDraft, refuse_other_training
from hasten.recipe.yaml_reader import check_keys, one_line, read_yaml_file

FORMATS: tuple[ModuleType, ...] = (llama_factory, axolotl, accelerate, training_arguments)
DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
MOST_KEYS, DEEPEST = 2000, 12
MISSING = {"model": "a model", "dataset": "records", "max_steps": "an end"}


@dataclass(frozen=True)
class ImportedRecipe:
    """A recipe out of another tool's file."""

    format: str
    values: dict[str, Any]
    rows: tuple[ImportedKey, ...]
    why: dict[str, str]

    @property
    def missing(self) -> list[str]:
        """Keys that a recipe needs and the file doesn't say."""
        found = [key for key in ("model", "dataset") if key not in self.values]
        ends = {"max_steps", "epochs", "max_tokens"} & set(self.values)
        return found if ends else [*found, "max_steps"]

    def to_yaml(self, source: str) -> str:
        """The recipe, each line with the key that it came from.

        Raises:
            InputError: read back, it has other keys.
        """
        lines = [f"# from {one_line(source)} ({self.format})"]
        for key, value in self.values.items():
            text = yaml.safe_dump({key: value}, sort_keys=False, width=100).rstrip()
            came = self.why.get(key)
            shown = came and "\n" not in text and came != key
            comment = f"  # {one_line(came)}" if shown else ""
            lines.append(text + comment)
        lines += [f"# {key}: ...  # missing: {MISSING[key]}" for key in self.missing]
        left = [row for row in self.rows if row.fate in ("unmapped", "contradicts")]
        lines += [""] if left else []
        lines += [f"# not taken over, {one_line(f'{row.key}: {row.words}')}" for row in left]
        return check_keys("\n".join(lines) + "\n", list(self.values))


def read(path: Path, ranks: int = 1) -> ImportedRecipe:
    """The recipe that a file of another trainer means.

    Args:
        path: YAML or JSON.
        ranks: processes that train, for formats that count their batch by device.

    Raises:
        InputError: no such file, too large or too deep, of no known format, or of a training
            that isn't supervised fine-tuning or continued pretraining.
    """
    found = read_yaml_file(path, "configuration")
    if not isinstance(found, dict) or not found:
        raise InputError(f"{path} holds no keys: give a configuration file of another trainer")
    given = {str(key): value for key, value in found.items()}
    if _count(given) > MOST_KEYS:
        raise InputError(f"{path} has more than {MOST_KEYS} values; that is no configuration")
    if set(DEEPSPEED) & set(given):
        return _deepspeed(path, given)
    scores = [(sum(mark in given for mark in f.MARKS), f) for f in FORMATS]
    score, best = max(scores, key=lambda pair: pair[0])
    if score < 2:
        names = ", ".join(f.NAME for f in FORMATS)
        raise InputError(
            f"{path} is no configuration of {names} or DeepSpeed: none has such keys as "
            f"{', '.join(list(given)[:3])}"
        )
    refuse_other_training(path, given)
    draft: RecipeDraft = best.draft_of(given, ranks)
    sharding.settled(draft)
    one_format(draft, path.parent)
    return _finished(best.NAME, draft, ranks)


def one_format(draft: RecipeDraft, folder: Path) -> None:
    """Where the DeepSpeed file says a number format, the plan's own is its, or contradicts it.

    A file that isn't there yet is read with the recipe, which refuses two formats.
    """
    file = draft.values.get("deepspeed")
    entry = next((e for e in draft.plan if isinstance(e, dict) and "autocast" in e), None)
    paths = [Path(str(file)), folder / str(file)]
    there = next((path for path in paths if path.is_file()), None)
    if entry is None or file is None or there is None:
        return
    try:
        config = read_config(there)
        own = next(
            (name for name in ("fp16", "bf16") if section_enabled(config, name) is True), None
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    if own is None:
        return
    draft.plan.remove(entry)
    draft.values["on_obstacle"] = "skip"  # as beside a plan: see _finished
    asked = entry["autocast"]["dtype"]
    for index, row in enumerate(draft.rows):
        if row.words == "plan: autocast":
            same = replace(row, words=f"in {file}")
            other = replace(row, fate="contradicts", words=f"{file} says {own}, which is kept")
            draft.rows[index] = same if asked == own else other


def _finished(name: str, draft: RecipeDraft, ranks: int) -> ImportedRecipe:
    values = dict(draft.values)
    if ranks > 1:
        values.setdefault("nproc", ranks)
    if draft.plan:
        values["plan"] = draft.plan
        values["on_obstacle"] = "skip"  # what can't work on this machine is said and left out
    return ImportedRecipe(name, values, tuple(draft.rows), draft.why)


def _deepspeed(path: Path, given: dict[str, Any]) -> ImportedRecipe:
    """Its keys are read where the recipe is; `hasten doctor --ds-config` shows what they become."""
    draft = RecipeDraft(given)
    draft.values["deepspeed"] = str(path)
    for key in given:
        draft.note(key, "mapped", "read from the file itself (deepspeed)")
    return _finished("DeepSpeed", draft, 1)


def _count(value: Any, depth: int = 0) -> int:
    """Values in it; more than any configuration where it is too deep."""
    if depth > DEEPEST:
        return MOST_KEYS + 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_count(one, depth + 1) for one in inner)
