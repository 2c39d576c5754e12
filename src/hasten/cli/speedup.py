"""``hasten speedup``: the recipe's techniques against the baseline, on the recipe's own job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.arguments import (
    Fresh,
    Overrides,
    RecipePath,
    Write,
    WriteBack,
    WriteTo,
    command_line,
    copied,
    named,
    writable,
)
from hasten.core.plan import name_of
from hasten.errors import FAILED, InputError
from hasten.formatting import duration
from hasten.measure.ablation import Design

if TYPE_CHECKING:
    from rich.console import Console

NOISE_FROM = 4  # rounds from which a second baseline tells something of the noise
TWO_BUILDS_FROM = 8  # rounds: then each build of a variant has four, and they can be compared
MORE_WARMUP = 8  # steps by which a warm-up may grow
GUARD_SHARE = 1 / 3  # of a budget: what the proofs of equal quality may take of it
MOST_ROUNDS = 30  # with a budget alone: more change an interval little


def speedup(
    path: RecipePath,
    overrides: Overrides = None,
    variants: Annotated[
        Literal["full", "cumulative", "single", "leave-one-out", "all", "greedy"],
        typer.Option(
            help="plan: baseline and plan; cumulative: one technique more at a time; alone: each "
            "by "
            "itself; left-out: the plan without each; all: both; climb: one more at a time, only "
            "what pays is kept"
        ),
    ] = "full",
    only: Annotated[
        str | None,
        typer.Option(help="variants of these techniques alone", metavar="NAME[,NAME...]"),
    ] = None,
    order: Annotated[
        Literal["slots", "gain"], typer.Option(help="in which a greedy search tries techniques")
    ] = "slots",
    rounds: Annotated[
        int | None,
        typer.Option(min=2, help="turns of each variant; 8, or as many as the budget allows"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="steps of a turn")] = 4,
    warmup: Annotated[
        int, typer.Option(min=1, help="least steps before the first round; 8 more if they differ")
    ] = 2,
    budget: Annotated[
        str | None,
        typer.Option(help="what it may take: 90s, 20m, 2h; variants are left out to keep it"),
    ] = None,
    builds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            help="fresh builds of each variant, a share of rounds on each; 2 from 8 on",
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
    grouping: Annotated[
        Literal["auto", "together", "groups", "fresh"],
        typer.Option(help="which variants are alive at once; auto: what memory holds"),
    ] = "auto",
    fresh: Fresh = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="write report.json here as well")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="copy what hasten regress needs into this folder", metavar="FOLDER"),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="a preset plan in place of the recipe's: article")
    ] = None,
    write: Write = False,
    write_to: WriteTo = None,
    verification: Annotated[
        bool, typer.Option("--verify/--no-verify", help="prove beforehand that quality is kept")
    ] = True,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for techniques of other mathematics")
    ] = 0,
) -> int:
    """Measure what the recipe's techniques gain on its own job."""
    from hasten.cli.train import warn_of_idle
    from hasten.cli.verify import beforehand
    from hasten.progress import Display
    from hasten.recipe.schema import load_recipe
    from hasten.recipe.yaml_reader import read_duration
    from hasten.report.bundle import NAME as BUNDLE
    from hasten.report.judgement import GUILTY
    from hasten.report.page import write_report
    from hasten.report.speedup import ablate, greedy_recipe

    writable("--json", json_out)
    if bundle is not None:
        try:
            bundle.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--bundle: {bundle} can't be written: {error.strerror}") from error
    back = WriteBack(path, write, write_to)
    back.check()
    changes = [*(overrides or []), *([f"plan={plan}"] if plan is not None else [])]
    recipe = load_recipe(path, changes)
    seconds = read_duration(budget) if budget is not None else None
    count = rounds or (MOST_ROUNDS if seconds is not None else 8)
    design = Design(
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
    if variants == "greedy" and only is not None:
        raise InputError(
            "only: a greedy search tries every technique of the plan; shorten the plan"
        )
    if variants != "greedy" and order != "slots":
        raise InputError(
            "order: only a greedy search tries techniques in an order; say --design greedy"
        )
    if seeds and not verification:
        raise InputError("seeds: the verification trains in pairs; leave --no-verify out")
    with Display() as display:
        share = None if seconds is None else GUARD_SHARE * seconds
        more: dict[str, Any] = {
            "design": design,
            "command": command_line(),
            "fresh": fresh,
            "audience": display,
            "also": beforehand(verification, seeds, fresh, display, share),
        }
        report: dict[str, Any] | None
        if variants == "greedy":
            title = f"What gradual optimisation keeps: {path.stem}"
            climbed = greedy_recipe(recipe, order=order, title=title, **more)
            print(f"{climbed}\n")
            report = climbed.report
        else:
            title = f"What the plan gains: {path.stem}"
            report = ablate(recipe, variants, only=named(only), title=title, **more)
    if report is None:
        print("nothing paid, so there is no plan to report on: no report was written")
        return 0
    page = write_report(report, Path(recipe.output))
    copied(page.with_name("report.json"), json_out)
    if bundle is not None:
        for name in (BUNDLE, "report.json"):
            copied(page.with_name(name), bundle / name)
    print_table(report)
    print(design_line(report["design"]))
    print(f"report: {page}")
    _write_best(report, back)
    idle = warn_of_idle({a["technique"]: a for a in report["variants"][-1]["effective"]})
    unproven = any(row["verdict"] in GUILTY for row in report["verification"] or ())
    if unproven:
        print("a proof of equal quality failed: see the verification's table in the report")
    return FAILED if unproven or (idle and recipe.require_effect) else 0


def print_table(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the report in short: a row that is slower than what it belongs beside is red.

    Where the output is no terminal, it is the same text without colour.
    """
    from rich.console import Console
    from rich.text import Text

    from hasten.report.judgement import variants_that_hurt
    from hasten.report.page import render_markdown
    from hasten.report.schema import read_report

    console = console or Console(highlight=False)
    red = variants_that_hurt(read_report(report)["variants"])
    for line in render_markdown(report).splitlines():
        name = line.split("|")[1].strip() if line.startswith("|") else None
        console.print(Text(line, "red" if name in red else ""), soft_wrap=True)
    console.print()


def _write_best(report: dict[str, Any], back: WriteBack) -> None:
    """Put the fastest plan of equal quality into the recipe, or say how, where it is another."""
    from hasten.recipe.write_back import plain_entry
    from hasten.report.judgement import fastest_of_equal_quality
    from hasten.report.page import recipe_plan
    from hasten.report.schema import read_report

    read = read_report(report)
    variant = fastest_of_equal_quality(read)
    recipe_entries = read["recipe"].get("plan") or []
    fastest_entries = None if variant is None else recipe_plan(variant, read)
    if fastest_entries is None or not recipe_entries:
        print("nothing is put into the recipe: no plan was shown to be faster at equal quality")
        return
    if fastest_entries != recipe_entries or back.asked or back.target:
        print(
            f"the fastest plan of equal quality: "
            f"{', '.join(map(name_of, fastest_entries)) or 'none'}"
        )
        back.write({"plan": [plain_entry(entry) for entry in fastest_entries]})


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def design_line(design: dict[str, Any]) -> str:
    """How it was measured, in a line."""
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
