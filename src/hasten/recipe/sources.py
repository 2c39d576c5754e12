"""The files of records that a recipe names."""

from __future__ import annotations

from pathlib import Path

from hasten.data.sources import entry_of
from hasten.recipe.schema import Recipe


def data_files(recipe: Recipe) -> list[Path]:
    """Files and folders, in the recipe's order; embedded corpora and names on a hub have none."""
    names = [source.path for source in recipe.datasets]
    names += [recipe.held_out] if isinstance(recipe.held_out, str) else []
    paths = []
    for name in names:
        entry = entry_of(name)
        paths.append(Path(str(entry[0])) if entry else Path(name))
    return [path for path in paths if path.exists()]
