"""The options of ``hasten tune``; the command, and torch with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hasten.cli.arguments import Overrides, RecipePath


def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    budget: Annotated[
        str, typer.Option(help="what all of it may take: 90s, 8m, 1h30m; the duel included")
    ] = "8m",
    sampler: Annotated[
        Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"],
        typer.Option(help="who proposes; auto: forecasts first, then what was learnt"),
    ] = "auto",
    objective: Annotated[
        Literal["tokens", "memory", "money", "pareto"],
        typer.Option(help="what counts; pareto: speed and memory, and the front between them"),
    ] = "tokens",
    only: Annotated[
        str | None,
        typer.Option(help="tune these techniques or slots alone", metavar="NAME[,NAME...]"),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="also techniques of other mathematics, behind the guard")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="paired trainings by which the guard proves a lossy winner")
    ] = 3,
    trials: Annotated[int | None, typer.Option(min=1, help="trials at most")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a turn")] = 4,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="measure anew, whatever was measured before")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="the winning recipe; OUTPUT/tuned.yaml of the recipe if left out"),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write the study here as well")
    ] = None,
) -> None:
    """Search for the fastest settings of a recipe on this machine, and prove them."""
    from hasten.cli.tune import Asked
    from hasten.cli.tune import tune as command

    asked = Asked(budget, sampler, objective, only, lossy, seeds, trials, steps, fresh)
    raise typer.Exit(command(recipe, overrides or [], asked, output, json_out))
