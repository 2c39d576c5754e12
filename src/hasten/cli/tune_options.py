"""The options of ``hasten tune``; the command, and torch with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hasten.cli.arguments import Overrides, RecipePath
from hasten.errors import InputError


def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    study: Annotated[
        Literal["speed", "learning"],
        typer.Option(
            help="speed: techniques and their knobs; learning: learning rate, warm-up and batch, "
            "by the held-out loss of whole trainings"
        ),
    ] = "speed",
    budget: Annotated[
        str | None,
        typer.Option(
            help="what trials and duel may take: 90s, 8m, 1h30m; 8m if left out, of learning 1h"
        ),
    ] = None,
    sampler: Annotated[
        Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"],
        typer.Option(help="who proposes; auto: forecasts first, then what was learnt"),
    ] = "auto",
    objective: Annotated[
        Literal["tokens", "memory", "money", "pareto", "time-to-loss"],
        typer.Option(
            help="what counts; pareto: speed and memory, and the front between them; "
            "time-to-loss: seconds to a held-out loss, by whole trainings"
        ),
    ] = "tokens",
    target_loss: Annotated[
        float | None,
        typer.Option(help="of time-to-loss; nearly what the recipe comes to, if left out"),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="tune these techniques or slots alone; of learning: learning_rate, warmup, batch",
            metavar="NAME[,NAME...]",
        ),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="also techniques of other mathematics, behind the guard")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="paired trainings by which the guard proves a lossy winner")
    ] = 3,
    trials: Annotated[int | None, typer.Option(min=1, help="trials at most")] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a round")] = 4,
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
    from hasten.cli.tune import TuneArguments, named
    from hasten.cli.tune import tune as command

    if study == "learning":
        from hasten.cli.tune import learn
        from hasten.tune.learning_study import LearningWishes

        for option, differs in (
            ("--sampler", sampler != "auto"),
            ("--objective", objective != "tokens"),
            ("--target-loss", target_loss is not None),
            ("--lossy", lossy),
            ("--seeds", seeds != 3),
            ("--steps", steps != 4),
        ):
            if differs:
                raise InputError(
                    f"{option} is of the study of speed; that of learning looks at the held-out "
                    "loss alone"
                )
        wishes = LearningWishes(named(only), trials, fresh)
        raise typer.Exit(learn(recipe, overrides or [], budget or "1h", wishes, output, json_out))
    speed = budget or "8m"
    asked = TuneArguments(
        speed, sampler, objective, target_loss, only, lossy, seeds, trials, steps, fresh
    )
    raise typer.Exit(command(recipe, overrides or [], asked, output, json_out))
