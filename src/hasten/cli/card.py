"""``hasten card``: a finished run's model card, with the findings of an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.recipe.schema import load_recipe
from hasten.report.card import CARD, write_card

FOLDERS = ("model", "adapter", "model_average", "adapter_average", "merged")


def card(run: Path, report: Path | None) -> None:
    """Write README.md into each of the run's folders with weights.

    Raises:
        InputError: no finished run, a report that isn't one, or a card that somebody has written.
    """
    if not (run / "recipe.yaml").is_file() or not (run / "summary.json").is_file():
        raise InputError(f"{run} holds no recipe.yaml and summary.json; give a finished run")
    recipe = load_recipe(run / "recipe.yaml").model_dump(mode="json")
    summary = _read(run / "summary.json")
    findings = None if report is None else _read(report)
    if findings is not None and not isinstance(findings.get("arms"), list):
        raise InputError(f"{report} is not the report.json of an experiment")
    folders = [run / name for name in FOLDERS if (run / name).is_dir()]
    if not folders:
        raise InputError(f"{run} holds no model and no adapter")
    for folder in folders:
        if not write_card(folder, recipe, summary, findings):
            raise InputError(f"{folder / CARD} was written by somebody else; move it away first")
        print(f"saved: {folder / CARD}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no object")
    return found
