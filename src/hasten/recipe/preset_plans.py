"""Preset plans: published plans, each as a data file next to this module.

A file lists the published settings and claims. For each setting it has the technique
that implements it here, or the reason why there is none. In a recipe, ``plan: NAME`` is
replaced by its techniques.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from hasten.formatting import did_you_mean
from hasten.recipe.yaml_reader import read_yaml_file

FOLDER = Path(__file__).parent / "plans"


def names() -> list[str]:
    """Returns the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def preset(name: str, ranks: int = 1) -> dict[str, Any]:
    """Returns a preset's data for a job on these ranks.

    The keys are ``source``, ``switches``, ``totals`` and ``not_comparable``. Each switch
    has a ``technique``, or a reason in ``missing``.

    Raises:
        ValueError: there is no preset of this name.
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
        dropped = ("missing", "ranks") if fits else ("technique", "settings", "ranks")
        switches.append({key: setting for key, setting in stored.items() if key not in dropped})
    return {**contents, "switches": switches}


def entries_of(setting: Any, ranks: Any = 1) -> Any:
    """Returns a recipe's ``plan``; a preset's name is replaced by its available techniques.

    ``ranks`` is the recipe's ``nproc``, unchecked; an invalid value counts as one rank.
    """
    if not isinstance(setting, str):
        return setting
    switches = preset(setting, ranks if type(ranks) is int else 1)["switches"]
    return [
        {switch["technique"]: switch["settings"]} if switch.get("settings") else switch["technique"]
        for switch in switches
        if "technique" in switch
    ]


def preset_of(entries: list[Any], ranks: int = 1) -> dict[str, Any] | None:
    """Returns the preset with exactly these entries of a resolved recipe; None if there is none.

    A resolved recipe contains no preset name. The same techniques are therefore the same
    experiment.
    """
    same = (name for name in names() if entries_of(name, ranks) == entries)
    return next((preset(name, ranks) for name in same), None)
