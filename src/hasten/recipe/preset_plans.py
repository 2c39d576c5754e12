"""Preset plans: a plan that somebody published, as a file of data beside this one.

A file lists the switches as they were announced, the technique that does each here (or why there is
none), and what was claimed. ``plan: NAME`` in a recipe stands for its techniques.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hasten.formatting import did_you_mean
from hasten.recipe.yaml_reader import read_yaml_file

FOLDER = Path(__file__).parent / "plans"


def names() -> list[str]:
    """The presets there are."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def preset(name: str, ranks: int = 1) -> dict[str, Any]:
    """A preset's data for a job on so many ranks.

    ``source``, ``switches`` (each has a ``technique``, or says why it is ``missing``), ``totals``,
    ``not_comparable``.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in names():
        hint = did_you_mean(name, ("auto", *names()))
        raise ValueError(
            f"no plan is called {name!r}{hint}; list techniques, or name one of: auto, "
            f"{', '.join(names())}"
        )
    contents: dict[str, Any] = read_yaml_file(FOLDER / f"{name}.yaml", "plan")
    switches = []
    for stored in contents["switches"]:
        fits = "technique" in stored and ranks >= stored.get("ranks", 1)
        gone = ("missing", "ranks") if fits else ("technique", "settings", "ranks")
        switches.append({key: value for key, value in stored.items() if key not in gone})
    return {**contents, "switches": switches}


def entries_of(value: Any, ranks: Any = 1) -> Any:
    """A recipe's ``plan`` with a preset's name replaced by its techniques, as far as they exist.

    ``ranks`` is the recipe's ``nproc`` as it was given; what is no number of ranks counts as one.
    """
    if not isinstance(value, str):
        return value
    switches = preset(value, ranks if type(ranks) is int else 1)["switches"]
    return [
        {switch["technique"]: switch["settings"]} if switch.get("settings") else switch["technique"]
        for switch in switches
        if "technique" in switch
    ]


def preset_of(entries: list[Any], ranks: int = 1) -> dict[str, Any] | None:
    """The preset whose techniques these entries of a resolved recipe are; None if they are none's.

    A resolved recipe keeps no name, so that the same techniques are the same experiment.
    """
    same = (name for name in names() if entries_of(name, ranks) == entries)
    return next((preset(name, ranks) for name in same), None)
