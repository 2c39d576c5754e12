"""``hasten speedup``: measures the recipe's techniques against the baseline, on its own job."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.arguments import (
    AsJson,
    Budget,
    Fresh,
    Only,
    Overrides,
    Rounds,
    Steps,
    Write,
    WriteBack,
    WriteTo,
    command_line,
    named,
    output_option,
    refuse_unused,
    text_to_stderr,
)
from hasten.cli.output import say
from hasten.core.plan import name_of
from hasten.errors import FAILED, InputError
from hasten.formatting import duration
from hasten.measure.ablation import Design

if TYPE_CHECKING:
    from rich.console import Console

NOISE_FROM = 4  # least rounds with which a second baseline is measured, for the noise
TWO_BUILDS_FROM = 8  # least rounds that are divided among two builds
MORE_WARMUP = 8  # steps by which a warm-up may grow
VERIFICATION_SHARE = 1 / 3  # largest share of a budget
RERUN = ("rerun", "path", "overrides", "rounds", "tolerance", "output", "budget", "as_json")
MOST_ROUNDS = 30  # if only a budget limits them; more rounds hardly narrow an interval


def speedup(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")
    ] = None,
    overrides: Overrides = None,
    design: Annotated[
        Literal["full", "cumulative", "single", "leave-one-out", "all", "greedy"],
        typer.Option(
            help="variants to compare. Full: baseline and plan. Cumulative: one technique more "
            "each time. Single: each alone. Leave-one-out: the plan without each. All: single and "
            "leave-one-out. Greedy: add one at a time, keep those that gain"
        ),
    ] = "full",
    only: Only = None,
    order: Annotated[
        Literal["slots", "gain"], typer.Option(help="order in which greedy adds techniques")
    ] = "slots",
    rounds: Rounds = None,
    steps: Steps = 4,
    warmup: Annotated[
        int, typer.Option(min=1, help="smallest number of steps before the first round")
    ] = 2,
    budget: Budget = None,
    builds: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="fresh builds of each variant; default: 2 from 8 rounds"),
    ] = None,
    noise: Annotated[
        bool | None,
        typer.Option(
            "--noise/--no-noise", help="measure a second baseline; default: from 4 rounds"
        ),
    ] = None,
    max_load: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="load of other processes that a valid round may have, as a share"
        ),
    ] = 0.25,
    grouping: Annotated[
        Literal["auto", "together", "groups", "fresh"],
        typer.Option(help="variants in memory at once; auto: as many as fit"),
    ] = "auto",
    fresh: Fresh = False,
    bundle: Annotated[
        Path | None,
        typer.Option(help="copy what --rerun needs into this folder", metavar="FOLDER"),
    ] = None,
    rerun: Annotated[
        Path | None,
        typer.Option(help="measure a stored experiment again", metavar="BUNDLE"),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="share of a gain that --rerun may find missing")
    ] = 0.02,
    output: Annotated[
        Path | None, output_option("folder; default: that of the recipe, or runs/rerun")
    ] = None,
    as_json: AsJson = False,
    write: Write = False,
    write_to: WriteTo = None,
    verification: Annotated[
        bool, typer.Option("--verify/--no-verify", help="verify quality before measuring")
    ] = True,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for each lossy technique")
    ] = 0,
) -> int:
    """Measure what the recipe's techniques gain on its own job."""
    if rerun is not None:
        from hasten.cli.rerun import rerun as measure_again

        refuse_unused(context, RERUN, "with --rerun")
        changes = [*([str(path)] if path is not None else []), *(overrides or [])]
        folder = output or Path("runs/rerun")
        return measure_again(rerun, changes, rounds, tolerance, folder, budget, as_json)
    if path is None:
        raise InputError("RECIPE is missing; give a recipe, or --rerun BUNDLE")
    every = (str(parameter.name) for parameter in context.command.params)
    refuse_unused(context, set(every) - {"tolerance"}, "without --rerun")
    from hasten.cli.train import warn_of_idle
    from hasten.cli.verify import beforehand
    from hasten.measure.quality import requirements
    from hasten.progress import Display
    from hasten.recipe.schema import load_recipe
    from hasten.recipe.yaml_reader import read_duration
    from hasten.report.bundle import NAME as BUNDLE
    from hasten.report.page import write_report
    from hasten.report.speedup import ablate, greedy_recipe

    if bundle is not None:
        try:
            bundle.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--bundle: {bundle} can't be written: {error.strerror}") from error
    back = WriteBack(path, write, write_to)
    back.check()
    changes = [*(overrides or []), *([f"output={output}"] if output is not None else [])]
    recipe = load_recipe(path, changes)
    seconds = read_duration(budget) if budget is not None else None
    count = rounds or (MOST_ROUNDS if seconds is not None else 8)
    settings = Design(
        rounds=count,
        steps=steps,
        warmup=warmup,
        longest_warmup=warmup + MORE_WARMUP,
        seed=recipe.seed,
        builds=builds or (2 if count >= TWO_BUILDS_FROM else 1),
        noise=count >= NOISE_FROM if noise is None else noise,
        foreign_load=max_load if max_load < 1 else None,
        budget_seconds=seconds,
        grouping=grouping,
    )
    if design == "greedy" and only is not None:
        raise InputError(
            "only: a greedy search tries every technique of the plan; shorten the plan"
        )
    if design != "greedy" and order != "slots":
        raise InputError(
            "order: only a greedy search tries techniques in an order; give --design greedy"
        )
    if seeds and not verification:
        raise InputError("seeds: the verification trains in pairs; leave --no-verify out")
    with text_to_stderr(as_json):
        with Display() as display:
            share = None if seconds is None else VERIFICATION_SHARE * seconds
            more: dict[str, Any] = {
                "design": settings,
                "command": command_line(),
                "fresh": fresh,
                "audience": display,
                "also": beforehand(verification, seeds, fresh, display, share),
            }
            report: dict[str, Any] | None
            if design == "greedy":
                title = f"What gradual optimisation keeps: {path.stem}"
                climbed = greedy_recipe(recipe, order=order, title=title, **more)
                say(f"{climbed}\n")
                report = climbed.report
            else:
                title = f"What the plan gains: {path.stem}"
                report = ablate(recipe, design, only=named(only), title=title, **more)
        if report is None:
            say("nothing paid, so there is no plan to report on: no report was written")
        else:
            page = write_report(report, Path(recipe.output))
            if bundle is not None and bundle.resolve() != page.parent.resolve():
                for name in (BUNDLE, "report.json"):
                    shutil.copyfile(page.with_name(name), bundle / name)
            print_table(report)
            say(design_line(report["design"]))
            say(f"report: {page}")
            _write_best(report, back)
    if as_json:
        say("null" if report is None else page.with_name("report.json").read_text())
    if report is None:
        return 0
    idle = warn_of_idle({a["technique"]: a for a in report["variants"][-1]["effective"]})
    unproven = any(row["verdict"] in requirements.FAILED for row in report["verification"] or ())
    if unproven:
        say(
            "a check of equal quality failed: see the verification's table in the report",
            file=sys.stderr if as_json else sys.stdout,
        )
    return FAILED if unproven or (idle and recipe.require_effect) else 0


def print_table(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the report in short; in a terminal, slower rows than their reference are red."""
    from rich.console import Console
    from rich.text import Text

    from hasten.report.conclusions import variants_that_hurt
    from hasten.report.page import render_markdown
    from hasten.report.schema import read_report

    console = console or Console(highlight=False)
    red = variants_that_hurt(read_report(report)["variants"])
    for line in render_markdown(report).splitlines():
        name = line.split("|")[1].strip() if line.startswith("|") else None
        console.print(Text(line, "red" if name in red else ""), soft_wrap=True)
    console.print()


def _write_best(report: dict[str, Any], back: WriteBack) -> None:
    """Writes the fastest plan of equal quality into the recipe, or prints the command for it."""
    from hasten.recipe.write_back import plain_entry
    from hasten.report.conclusions import fastest_of_equal_quality
    from hasten.report.page import recipe_plan
    from hasten.report.schema import read_report

    read = read_report(report)
    variant = fastest_of_equal_quality(read)
    recipe_entries = read["recipe"].get("plan") or []
    fastest_entries = None if variant is None else recipe_plan(variant, read)
    if fastest_entries is None or not recipe_entries:
        say("nothing is put into the recipe: no plan was shown to be faster at equal quality")
        return
    if fastest_entries != recipe_entries or back.requested or back.target:
        say(
            f"the fastest plan of equal quality: "
            f"{', '.join(map(name_of, fastest_entries)) or 'none'}"
        )
        back.write({"plan": [plain_entry(entry) for entry in fastest_entries]})


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def design_line(design: dict[str, Any]) -> str:
    """Returns a line on rounds, steps and builds of a measurement."""
    clauses = [
        f"{_counted(design['rounds'], 'round')} of {_counted(design['steps'], 'step')} in "
        f"{duration(design['seconds'])}",
        design["grouping"],
    ]
    if design.get("ranks"):
        clauses.append(f"{design['ranks']} ranks in each variant")
    if design["builds"] > 1:
        clauses.append(f"{design['builds']} builds of each variant")
    if design["redone_rounds"]:
        clauses.append(f"{design['redone_rounds']} rounds done again for foreign load")
    if design["resumed"]:
        clauses.append("resumed: variants trained again from their seed")
    if design["dropped"]:
        clauses.append("left out: " + "; ".join(design["dropped"]))
    return "measured: " + "; ".join(clauses)
