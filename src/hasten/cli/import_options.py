"""The options of ``hasten import``; the command is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import Overrides


def import_(
    config: Annotated[Path, typer.Argument(help="YAML or JSON of another trainer")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the recipe here; else it is shown")
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="processes that will train")] = 1,
) -> None:
    """Turn a LLaMA-Factory, axolotl, accelerate, HF or DeepSpeed configuration into a recipe."""
    from hasten.cli.import_ import import_ as command

    command(config, overrides or [], output, nproc)
