"""``hasten doctor --ds-config FILE``: what becomes of each key of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.parts.distributed.deepspeed_config import HONOURED, IGNORED, REFUSED
from hasten.recipe.preset_plans import entries_of
from hasten.recipe.shorthands import meaning_of, settings_of, techniques_of, world_of
from hasten.recipe.yaml_reader import read_overrides, read_yaml_file


def ds_config(file: Path, recipe: Path | None, overrides: Sequence[str]) -> int:
    """Print a line for each key and what a recipe gets from it; 2 if a key is refused."""
    values: dict[str, Any] = read_yaml_file(recipe, "recipe") if recipe else {}
    if not isinstance(values, dict):
        raise InputError(f"{recipe} is not a recipe: it must be lines of `key: value`")
    values |= read_overrides(overrides)
    try:
        plan = entries_of(values.get("plan") or [])
        found = meaning_of(file, values, plan)
    except ValueError as error:
        raise InputError(str(error)) from error
    width = max((len(row.key) for row in found.rows), default=0)
    for fate in (HONOURED, IGNORED, REFUSED):
        for row in found.rows:
            if row.fate == fate:
                print(f"{fate:<9} {row.key:<{width}}  {row.words}")
    print(f"\nto a recipe, for {world_of(values)} rank(s):")
    for name, value in settings_of(found).items():
        print(f"  {name}: {value}")
    for entry in techniques_of(found, values):
        print(f"  plan: {entry}")
    if not found.refused:
        print(f"`deepspeed: {file}` in a recipe trains so; deep_speed in its plan, on DeepSpeed")
    return 2 if found.refused else 0
