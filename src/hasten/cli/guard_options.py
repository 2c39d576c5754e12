"""The options of ``hasten guard``; the command, and torch with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import Overrides, RecipePath


def guard(
    recipe: RecipePath,
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for each technique of other mathematics")
    ] = 0,
    tokens: Annotated[
        int, typer.Option(min=0, help="tokens of each such training; 0: those of 50 steps")
    ] = 0,
    margin: Annotated[
        float, typer.Option(help="by how much the held-out loss may be worse, a share")
    ] = 0.01,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the findings here as well")
    ] = None,
) -> None:
    """Prove that a recipe's techniques keep the model as good as they promise."""
    from hasten.cli.guard import guard as command

    raise typer.Exit(command(recipe, overrides or [], seeds, tokens, margin, json_out))
