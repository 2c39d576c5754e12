"""``hasten init``: look at model, data and machine, and write a first recipe."""

from __future__ import annotations

from pathlib import Path

from hasten.errors import InputError
from hasten.recipe.suggest import suggest


def init(model: str, dataset: str, recipe: Path) -> None:
    """Write the recipe; a file that exists is left as it is."""
    if recipe.exists():
        raise InputError(f"{recipe} exists; name another file with --recipe")
    text = suggest(model, dataset, output=f"runs/{recipe.stem}")
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        with recipe.open("x") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{recipe} can't be written: {error.strerror or error}") from error
    print(text, end="")
    print(f"\nwritten: {recipe}\nnext: hasten doctor {recipe}")
