"""The commands of ``hasten data``; what does the work is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import Overrides, RecipePath

app = typer.Typer(help="Look at a data set, or convert it.", no_args_is_help=True)


@app.command("inspect")
def data_inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="records to show")] = 3,
) -> None:
    """Show records as the model will see them, trained parts marked."""
    from hasten.cli.data import inspect as command

    command(recipe, overrides or [], count)


@app.command("stats")
def data_stats(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    html: Annotated[Path | None, typer.Option(help="write a page with drawings here")] = None,
) -> None:
    """Show lengths, trained share, duplicates, padding and packing of a recipe's data."""
    from hasten.cli.data import stats as command

    command(recipe, overrides or [], as_json, html)


@app.command("pack")
def data_pack(
    recipe: RecipePath,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--to", help="the .arrow or .parquet file to write")] = (
        Path("packed.parquet")
    ),
    row_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of a row at most; cutoff_len if left out")
    ] = None,
    force: Annotated[bool, typer.Option(help="replace a file that exists")] = False,
) -> None:
    """Write a recipe's records as packed rows, for this or another trainer."""
    from hasten.cli.data import pack as command

    command(recipe, overrides or [], output, row_tokens, force)


@app.command("convert")
def data_convert(
    sources: Annotated[list[Path], typer.Argument(help="files or folders to read")],
    output: Annotated[Path, typer.Option("--to", help="the JSONL file to write")],
    max_rejected: Annotated[float, typer.Option(min=0, help="as in a recipe")] = 0.001,
) -> None:
    """Write records of any known shape as JSONL of messages."""
    from hasten.cli.data import convert as command

    command(sources, output, max_rejected)
