"""The options of ``hasten speedup``; the command, and torch with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hasten.cli.arguments import Overrides, RecipePath


def speedup(
    recipe: RecipePath,
    overrides: Overrides = None,
    arms: Annotated[
        Literal["plan", "ladder", "alone", "left-out", "all", "climb"],
        typer.Option(
            help="plan: baseline and plan; ladder: one technique more at a time; alone: each by "
            "itself; left-out: the plan without each; all: both; climb: one more at a time, only "
            "what pays is kept"
        ),
    ] = "plan",
    only: Annotated[
        str | None,
        typer.Option(help="arms of these techniques alone", metavar="NAME[,NAME...]"),
    ] = None,
    order: Annotated[
        Literal["slots", "gain"], typer.Option(help="in which a climb tries techniques")
    ] = "slots",
    rounds: Annotated[
        int | None,
        typer.Option(min=2, help="turns of each arm; 8, or as many as the budget allows"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a turn")] = 4,
    warmup: Annotated[
        int, typer.Option(min=1, help="least steps before the first round; 8 more if they differ")
    ] = 2,
    budget: Annotated[
        str | None,
        typer.Option(help="what it may take: 90s, 20m, 2h; arms are left out to keep it"),
    ] = None,
    builds: Annotated[
        int | None,
        typer.Option(
            min=1, max=8, help="fresh builds of each arm, a share of rounds on each; 2 from 8 on"
        ),
    ] = None,
    noise: Annotated[
        bool | None,
        typer.Option(
            "--noise/--no-noise", help="a second baseline takes turns; on from 4 rounds on"
        ),
    ] = None,
    max_load: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="share of the machine others may use in a round that counts; 1: any"
        ),
    ] = 0.25,
    group: Annotated[
        Literal["auto", "together", "groups", "fresh"],
        typer.Option("--grouping", help="which arms are alive at once; auto: what memory holds"),
    ] = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="measure anew, whatever was measured before")
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write report.json here as well")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="write a .zip for hasten regress here", metavar="FILE.zip")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="a preset plan in place of the recipe's: article")
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="prove beforehand that quality is kept")
    ] = True,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for techniques of other mathematics")
    ] = 0,
) -> None:
    """Measure what the recipe's techniques gain on its own job."""
    from hasten.cli.speedup import SpeedupOptions
    from hasten.cli.speedup import speedup as command

    asked = (rounds, steps, warmup, budget, builds, noise, max_load, group, fresh, guard, seeds)
    changes = [*(overrides or []), *([f"plan={plan}"] if plan is not None else [])]
    code = command(recipe, changes, SpeedupOptions(arms, only, order, *asked), json_out, bundle)
    raise typer.Exit(code)
