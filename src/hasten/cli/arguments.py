"""Arguments that several commands take, and a look at them before any work begins."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.errors import InputError

RecipePath = Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes to the recipe", metavar="[KEY=VALUE]...")
]


Fresh = Annotated[bool, typer.Option("--fresh", help="measure anew, whatever was measured before")]
Write = Annotated[
    bool, typer.Option("--write", help="put what paid into the recipe; comments stay")
]
WriteTo = Annotated[
    Path | None, typer.Option("--write-to", help="the same into a new file", metavar="NEW.yaml")
]
FEWEST = 16  # characters of a token: fewer could be guessed
STARTED = time.perf_counter()  # of the command


def command_line() -> str:
    """The command as it was given."""
    return "hasten " + " ".join(shlex.quote(word) for word in sys.argv[1:])


def check_token(token: str | None) -> None:
    """Raise InputError for a token of ``--token`` that is short or has other characters."""
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{FEWEST},200}}", token):
        raise InputError(
            f"--token must be {FEWEST} to 200 letters, digits, or - _ . ~; without it "
            "there is a new one each time"
        )


def named(text: str | None) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def writable(option: str, path: Path | None) -> Path | None:
    """The file that an option names, refused before any work if it can't become one."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InputError(f"{option}: {path} can't be written; name a file in an existing folder")
    return path


def copied(source: Path, target: Path | None) -> None:
    """A result as a file that an option names as well, which may be the very same one."""
    if target is not None and not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class WriteBack:
    """Whether, and where, a command puts what it found into the recipe.

    Args:
        recipe: its file.
        asked: ``--write``.
        target: ``--write-to``: another file, which may not be there yet.
    """

    recipe: Path
    asked: bool = False
    target: Path | None = None

    def check(self) -> None:
        """Before anything is measured. Raises InputError for a place that can't be written."""
        if not (self.asked or self.target):
            return
        if self.target is not None and self.target.exists():
            raise InputError(f"--write-to: {self.target} is there already; name a new file")
        writable("--write-to" if self.target else "--write", self.target or self.recipe)

    def write(self, changes: Mapping[str, Any]) -> None:
        """Write the changes and show them; or say which command would."""
        from hasten.recipe.write_back import (
            write_back,  # planning, which loads this, needs no torch
        )

        if not (self.asked or self.target):
            print(f"to put this into the recipe: {command_line()} --write")
            return
        difference = write_back(self.recipe, changes, self.target)
        print(difference or f"{self.recipe} has these settings already")
