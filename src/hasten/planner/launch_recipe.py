"""The recipe as it is launched: the launcher decides ranks, restarts and where to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.launch.targets.job import MARK
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Recipe, recipe_from

TINY = {
    "llama": "deepseek-llm-tiny",
    "qwen2": "r1-distill-qwen-tiny",
    "deepseek_v2": "v2-lite-tiny",
    "deepseek_v3": "v3-tiny",
}


def recipe_there(recipe: Recipe, checkpoints: str | None, leave_file: str | None) -> str:
    """Its text: ranks and restarts are the launcher's, and every start goes on where one ended.

    Without checkpoints in the plan a lost machine would cost the whole run: dynamic ones join it.
    """
    values = recipe.model_dump(mode="json")
    values |= {"nproc": 1, "min_nproc": None, "max_restarts": 0, "warm_restarts": False}
    if recipe.resume == "never":
        values["resume"] = "auto"
    if not any(_names_checkpoints(entry) for entry in recipe.plan):
        values["checkpoint_every"] = "dynamic"
    if checkpoints is not None:
        values["checkpoint_dir"] = checkpoints
    if leave_file is not None and recipe.leave_file is None:
        values["leave_file"] = leave_file
    text = recipe_from(values, "the recipe for the launch").to_yaml()
    return f"{MARK}: the recipe as it runs there\n{text}"


def records() -> str:
    """Records for a rehearsal, as JSONL; every run of a rehearsal has the same."""
    lines = [f"{MARK}: records of a rehearsal"]
    lines += [f"{n} and {n + 1} make {2 * n + 1}. " * (1 + n % 7) for n in range(400)]
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)


def tiny_recipe(recipe: Recipe, ranks: int, output: Path, dataset: Path) -> Recipe:
    """The same plan on a model of the same family that a processor trains in seconds."""
    values: dict[str, Any] = recipe.model_dump(mode="json")
    values |= {
        "model": TINY[_family(recipe)],
        "tokenizer": None,
        "dataset": str(dataset),
        "columns": {},
        "chat_template": "auto",
        "held_out": 4,
        "max_records": 64 + 8 * ranks,
        "cutoff_len": 128,
        "vocabulary": 512,
        "max_steps": 3,
        "epochs": None,
        "max_tokens": None,
        "global_batch_size": 2 * ranks,
        "global_batch_tokens": None,
        "warmup_steps": 0,
        "eval_every": 0,
        "patience": 0,
        "price": None,
        "device": "cpu",
        "output": str(output),
        "on_obstacle": "skip",
        "require_effect": False,
        "resume": "never",
        "leave_file": None,
        "leave_command": None,
        "transport": {},
    }
    return recipe_from(values, "the recipe of the rehearsal")


def _family(recipe: Recipe) -> str:
    from hasten.models.load import read_config

    known = PRESETS.get(recipe.model)
    family = known.architecture if known else str(read_config(recipe.model).model_type)
    if family not in TINY:
        raise InputError(f"--rehearse: there is no tiny {family}; there is {', '.join(TINY)}")
    return family


def _names_checkpoints(entry: Any) -> bool:
    if isinstance(entry, dict):
        entry = entry.get("technique") or next(iter(entry), "")
    return str(entry).lower().replace("-", "_") == "checkpoints"
