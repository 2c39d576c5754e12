"""Stamps of the files that a recipe names: what tells, without reading them, that they changed.

A file that changed has another size or time, as for make. A folder stands for all its files, those
in its folders included, since saved data sets and tokenizers keep theirs there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hasten.errors import InputError

DEEPEST = 4  # levels of folders within a folder
MOST_FILES = 100_000


def stamps(names: Iterable[str], output: Path) -> list[list[Any]]:
    """Name, size and time of each file, and of each in a folder; the names of what isn't there.

    Folders count with those in them, four levels deep, since data sets and tokenizers may keep
    their files there. Hidden folders and folders of runs (they have a recipe.yaml) don't, nor does
    ``output``: what a run writes beside its own data must not make it prepare that data anew.
    """
    found: list[list[Any]] = []
    waiting = [(Path(name), 0) for name in names]
    while waiting:
        path, depth = waiting.pop()
        if not os.path.isdir(path):  # unlike Path's, silent about names that no file can have
            found.append(_stamp(path))
            if len(found) > MOST_FILES:
                raise InputError(
                    f"{path.parent} and the other files that the recipe names are more than "
                    f"{MOST_FILES:,}: name the files that are meant, or a smaller folder"
                )
        elif depth == 0 or not _apart(path, depth, output.resolve()):
            waiting += [(inner, depth + 1) for inner in _inside(path)]
    return sorted(found, key=str)


def _apart(folder: Path, depth: int, output: Path) -> bool:
    """Whether a folder within a folder has nothing to do with the data."""
    if depth > DEEPEST or folder.name.startswith("."):
        return True
    return folder.resolve().is_relative_to(output) or (folder / "recipe.yaml").exists()


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # whoever needs what is in it will say so
        return []


def _stamp(path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except (OSError, ValueError):  # absent, a link to nothing, or no name of a file
        return [str(path)]
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
