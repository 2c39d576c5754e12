"""Preset plans: a plan that somebody published, as a file of data beside this one.

A file lists the switches as they were announced, the technique that does each here (or why there is
none), and what was claimed. ``plan: NAME`` in a recipe stands for its techniques.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hasten.core.plan import did_you_mean
from hasten.recipe.plain_yaml import read_yaml_file

FOLDER = Path(__file__).parent / "plans"


def names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def preset(name: str) -> dict[str, Any]:
    """A preset's data: ``source``, ``switches``, ``totals``, ``not_comparable``.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in names():
        hint = did_you_mean(name, names())
        raise ValueError(
            f"no plan is called {name!r}{hint}; list techniques, or name one of: "
            f"{', '.join(names())}"
        )
    found: dict[str, Any] = read_yaml_file(FOLDER / f"{name}.yaml", "plan")
    return found


def entries_of(value: Any) -> Any:
    """A recipe's ``plan`` with a preset's name replaced by its techniques, as far as they exist."""
    if not isinstance(value, str):
        return value
    return [s["technique"] for s in preset(value)["switches"] if "technique" in s]


def preset_of(entries: list[Any]) -> dict[str, Any] | None:
    """The preset whose techniques these entries of a resolved recipe are; None if they are none's.

    A resolved recipe keeps no name, so that the same techniques are the same experiment.
    """
    return next((preset(name) for name in names() if entries_of(name) == entries), None)
