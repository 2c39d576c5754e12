"""Writes measured settings into a recipe's file; comments and the order of keys stay."""

from __future__ import annotations

import difflib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from hasten.core.plan import Plan, entry_of, name_of
from hasten.errors import InputError
from hasten.machine.files import write_atomic
from hasten.recipe.shorthands import catalogue


def write_back(path: Path, changes: Mapping[str, Any], target: Path | None = None) -> str:
    """Changes keys in a recipe's file; returns a unified diff, empty without changes.

    Args:
        path: the recipe.
        changes: new values of keys; in a plan, entries that already exist keep their
            comments.
        target: path of the changed recipe; default: the recipe itself.

    Raises:
        InputError: the file can't be read, changed or written.
    """
    try:
        before = path.read_text()
        yaml = YAML()
        yaml.preserve_quotes = True
        yaml.width = 4096  # existing lines aren't broken
        lists = [line for line in before.splitlines() if line.lstrip().startswith("- ")]
        offset = min((len(line) - len(line.lstrip()) for line in lists), default=2)
        yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
        recipe = yaml.load(before)
        if not isinstance(recipe, CommentedMap):
            raise InputError(f"{path} is not a recipe: it must be lines of `key: value`")
        for key, setting in changes.items():
            if key == "plan":
                _put_plan(recipe, list(setting))
            elif recipe.get(key) != setting:
                recipe[key] = setting
        text = io.StringIO()
        yaml.dump(recipe, text)
        after = text.getvalue()
        write_atomic(target or path, after)
    except YAMLError as error:
        raise InputError(f"{path} can't be changed: {' '.join(str(error).split())}") from error
    except OSError as error:
        where = error.filename or path
        raise InputError(f"{where} can't be written: {error.strerror or error}") from error
    names = str(path), str(target or path)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=1)
    return "\n".join(lines)


def _put_plan(recipe: CommentedMap, entries: Sequence[Any]) -> None:
    """Removes entries that aren't in the new plan, and appends new ones."""
    plan, wanted = recipe.get("plan"), {name_of(entry): entry for entry in entries}
    if not isinstance(plan, CommentedSeq) or not {name_of(entry) for entry in plan} & set(wanted):
        recipe["plan"] = list(entries)
        if isinstance(plan, CommentedSeq):
            recipe.ca.items.pop("plan", None)  # the comment of a list that is replaced
        return
    for index in reversed(range(len(plan))):
        if name_of(plan[index]) not in wanted:
            del plan[index]
    positions = {name_of(entry): index for index, entry in enumerate(plan)}
    for name, entry in wanted.items():
        if name not in positions:
            plan.append(entry)
        elif isinstance(entry, Mapping) and entry != plan[positions[name]]:
            plan[positions[name]] = entry


def plain_entry(entry: Any) -> Any:
    """Returns a plan's entry in short form: the technique's name, and its changed settings."""
    (technique,) = Plan.from_list([entry], catalogue())
    return entry_of(technique)
