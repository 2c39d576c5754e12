"""A recipe as people write it: every line that isn't a default, a plan, and words at its head."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.recipe.schema import Recipe
from hasten.recipe.yaml_reader import one_line


def recipe_text(recipe: Recipe, plan: Plan, words: Sequence[str]) -> str:
    """A recipe with a plan as people write it, with words as comments at its head."""
    values = {
        name: value
        for name, value in recipe.model_dump(mode="json").items()
        if name in recipe.model_fields_set and name not in ("plan", "checkpoint_every")
    }
    head = [line for text in words for line in textwrap.wrap(one_line(text), 97)]
    comment = "".join(f"# {line}\n" for line in head)
    entries = [_entry(t) for t in plan]
    body = yaml.safe_dump({**values, "plan": entries}, sort_keys=False, width=100)
    return f"{comment}{body}"


def _entry(technique: Technique) -> Any:
    """A technique as people write it: its name, and what differs from its defaults."""
    fields = dataclasses.fields(technique)  # type: ignore[arg-type]  # every technique is one
    plain = technique.settings()
    changed = {f.name: plain[f.name] for f in fields if getattr(technique, f.name) != f.default}
    return {technique.name(): changed} if changed else technique.name()
