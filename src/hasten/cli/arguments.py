"""Arguments that several commands take, and a look at them before any work begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from hasten.errors import InputError

RecipePath = Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes to the recipe", metavar="[KEY=VALUE]...")
]


def writable(option: str, path: Path | None) -> Path | None:
    """The file that an option names, refused before any work if it can't become one."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InputError(f"{option}: {path} can't be written; name a file in an existing folder")
    return path


def copied(source: Path, target: Path | None) -> None:
    """A result as a file that an option names as well, which may be the very same one."""
    if target is not None and not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)
