"""``hasten init``: writes a first recipe for a model, data and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import output_option
from hasten.cli.output import say
from hasten.errors import InputError


def init(
    model: Annotated[str, typer.Argument(help="a preset, a Hugging Face folder, or a hub name")],
    dataset: Annotated[str, typer.Argument(help="a data file or folder, stdlib, or stdlib-text")],
    recipe: Annotated[Path, output_option("the recipe")] = Path("recipe.yaml"),
) -> None:
    """Write a first recipe for a model and a data set."""
    from hasten.progress import Display
    from hasten.recipe.suggest import suggest

    if recipe.exists():
        raise InputError(f"{recipe} exists; name another file with --output")
    with Display() as display:
        text = suggest(model, dataset, f"runs/{recipe.stem}", display.tell)
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        with recipe.open("x") as file:  # "x" keeps a file that another program has just created
            file.write(text)
    except OSError as error:
        raise InputError(f"{recipe} can't be written: {error.strerror or error}") from error
    say(text, end="")
    say(f"\nwritten: {recipe}\nnext: hasten check {recipe}")
