"""Arguments that several commands share, with checks that run before any work.

An option name has one meaning in all commands: its help is the same up to the first colon.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.cli.output import say
from hasten.errors import InputError

RecipePath = Annotated[Path, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="changes to the recipe", metavar="[KEY=VALUE]...")
]


AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON to stdout")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="limit of the total time: 90s, 20m, 1h30m", metavar="TIME"),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="measure again; ignore stored results")]
Lossy = Annotated[
    bool, typer.Option("--lossy", help="include techniques and formats that change the mathematics")
]
Only = Annotated[
    str | None,
    typer.Option("--only", help="limit the study to these names", metavar="NAME[,NAME...]"),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", min=2, help="rounds of each variant; default: by the budget, or 8"),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="steps to measure, of each round")]
Write = Annotated[
    bool, typer.Option("--write", help="edit the recipe in place with the result; keeps comments")
]
WriteTo = Annotated[
    Path | None,
    typer.Option("--write-to", help="write the edited recipe to a new file", metavar="NEW.yaml"),
]
FEWEST = 16  # characters of a token: fewer could be guessed
Nodes = Annotated[int, typer.Option("--nodes", help="number of hosts")]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", help="GPUs of each host")]
STARTED = time.perf_counter()  # start of the command


def output_option(text: str) -> Any:
    """Returns the option ``-o/--output``; ``text`` names the file or folder and its default."""
    return typer.Option("--output", "-o", help=f"where results go: {text}")


def command_line() -> str:
    """Returns the command line, quoted for a shell."""
    return "hasten " + " ".join(shlex.quote(word) for word in sys.argv[1:])


def check_token(token: str | None) -> None:
    """Raises InputError for a value of ``--token`` that is short or has other characters."""
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9_.~-]{{{FEWEST},200}}", token):
        raise InputError(
            f"--token must be {FEWEST} to 200 letters, digits, or - _ . ~; without the option, "
            "each start has a new random token"
        )


def named(text: str | None) -> tuple[str, ...]:
    """Splits a list of names at its commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def writable(option: str, path: Path | None) -> Path | None:
    """Returns an option's file; raises InputError if it can't be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InputError(f"{option}: {path} can't be written; name a file in an existing folder")
    return path


def text_to_stderr(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Moves tables and sentences to stderr if stdout is for JSON alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def refuse_unused(context: typer.Context, used: Collection[str], mode: str) -> None:
    """Checks that every option on the command line has an effect.

    Args:
        context: that of the command.
        used: names of the parameters that the mode reads.
        mode: the option that selects the mode, for the message.

    Raises:
        InputError: an option outside ``used`` was given.
    """
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{parameter.opts[0]}: it has no effect {mode}; leave it out")


@dataclass(frozen=True)
class WriteBack:
    """Settings for writing a command's result into a recipe.

    Args:
        recipe: file of the recipe.
        requested: ``--write``.
        target: ``--write-to``: another file, which doesn't have to exist yet.
    """

    recipe: Path
    requested: bool = False
    target: Path | None = None

    def check(self) -> None:
        """Raises InputError if the file can't be written; called before anything is measured."""
        if not (self.requested or self.target):
            return
        if self.target is not None and self.target.exists():
            raise InputError(f"--write-to: {self.target} is there already; name a new file")
        writable("--write-to" if self.target else "--write", self.target or self.recipe)

    def write(self, changes: Mapping[str, Any]) -> None:
        """Writes the changes and shows them, or prints the command that would write them."""
        from hasten.recipe.write_back import write_back  # loads torch

        if not (self.requested or self.target):
            say(f"to put this into the recipe: {command_line()} --write")
            return
        difference = write_back(self.recipe, changes, self.target)
        say(difference or f"{self.recipe} has these settings already")
