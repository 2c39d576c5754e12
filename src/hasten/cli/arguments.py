"""Arguments that several commands take, and a look at them before any work begins."""

from __future__ import annotations

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
