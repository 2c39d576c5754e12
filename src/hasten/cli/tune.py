"""``hasten tune``: searches for the best settings of a recipe within a budget of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.arguments import (
    AsJson,
    Budget,
    Fresh,
    Lossy,
    Only,
    Overrides,
    RecipePath,
    Steps,
    Write,
    WriteBack,
    WriteTo,
    named,
    output_option,
    text_to_stderr,
    writable,
)
from hasten.cli.output import say
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.formatting import duration
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.measure.quality.verification import Rows
    from hasten.measure.recipe_experiment import ExperimentSubject
    from hasten.recipe.price import Price
    from hasten.recipe.schema import Recipe
    from hasten.tune.api import StudyResult


def tune(
    path: RecipePath,
    overrides: Overrides = None,
    budget: Budget = None,
    sampler: Annotated[
        Literal["auto", "tpe", "gp", "random", "genetic", "cmaes", "bandit"],
        typer.Option(help="how points are proposed; auto: forecasts first, then what was learnt"),
    ] = "auto",
    objective: Annotated[
        Literal["tokens", "memory"],
        typer.Option(help="what counts: tokens per second, or peak memory"),
    ] = "tokens",
    only: Only = None,
    lossy: Lossy = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="paired trainings for each lossy technique")
    ] = 3,
    trials: Annotated[int | None, typer.Option(min=1, help="largest number of trials")] = None,
    steps: Steps = 4,
    fresh: Fresh = False,
    output: Annotated[
        Path | None,
        output_option("the winning recipe; default: tuned.yaml in its folder"),
    ] = None,
    as_json: AsJson = False,
    write: Write = False,
    write_to: WriteTo = None,
) -> int:
    """Search for a recipe's best settings within a budget."""
    from hasten.measure.quality.verification import VerificationDesign, verified
    from hasten.progress import Display
    from hasten.recipe.schema import load_recipe
    from hasten.tune.api import TuneOptions
    from hasten.tune.api import tune as tune_job

    writable("--output", output)
    back = WriteBack(path, write, write_to)
    back.check()
    recipe = load_recipe(path, overrides or [])
    with Display() as display:

        def prove(subject: ExperimentSubject, plan: Plan) -> Sequence[str]:
            display.tell("the winner is verified; these trainings aren't part of the budget")
            design = VerificationDesign(seeds=seeds)
            shown = subject.recipe.model_copy(update={"plan": plan.to_list()})
            winner = replace(subject, recipe=shown, plan=plan)
            return objections(verified(winner, design, display.tell, fresh))

        options = TuneOptions(
            *(sampler, objective, lossy, named(only), trials), *(recipe.seed, steps, fresh)
        )
        study = tune_job(recipe, budget or "8m", options, audience=display, prove=prove)
    target = output or Path(recipe.output) / "tuned.yaml"
    write_result(target, study.text)
    with text_to_stderr(as_json):
        show(study, recipe.price, recipe.nproc)
        say(f"\nrecipe: {target}\nstudy: {study.folder / 'study.json'}")
        back.write(_changed(recipe, load_recipe(target)))
    if as_json:
        say((study.folder / "study.json").read_text())
    return 0


def _changed(before: Recipe, after: Recipe) -> dict[str, Any]:
    """Returns the keys of the winner that differ from the recipe's, as a recipe writes them."""
    from hasten.recipe.write_back import plain_entry

    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    changes = {
        key: setting for key, setting in new.items() if setting != old[key] and key != "auto_plan"
    }
    if "plan" in changes or before.auto_plan is not None:
        changes["plan"] = [plain_entry(entry) for entry in new["plan"]]
    return changes


def objections(findings: Rows) -> list[str]:
    """Returns objections to a winner: failed checks, and required checks without proof."""
    from hasten.measure.quality.requirements import failures

    unproven = [
        row
        for row in findings["verification"]
        if row["verdict"] == "not tested"
        or (row["verdict"] == "undecided" and row["fidelity"] == Fidelity.LOSSY.name)
    ]
    return [*failures(findings), *(f"{row['technique']}: {row['text']}" for row in unproven)]


def show(study: StudyResult, price: Price | None = None, devices: int = 1) -> None:
    """Prints the final comparison as a table, the result, and the saving if there is a price."""
    from hasten.tune.report import ratio_text, says_of
    from hasten.tune.space import changes_text

    report = study.report
    start = report["start"]
    for row in (report["final_comparison"] or {"variants": ()})["variants"]:
        say(f"{row['name']:15}  {ratio_text(row['ratio']):22}  {says_of(row)}")
        if row.get("settings"):
            changes = {k: v for k, v in row["settings"].items() if start["settings"].get(k) != v}
            say(f"{'':17}{changes_text(changes)}")
    say(f"\n{study}")
    winner = report["winner"]
    if winner and price is not None and winner["ratio"]["median"]:
        before = price.money(1e6 / report["start"]["rate"], price.paid(devices))
        after = before / winner["ratio"]["median"]
        say(f"a million tokens: {before:.4g} {price.currency} before, {after:.4g} after")
    say(f"in {duration(report['seconds'])} of {duration(report['budget_seconds'])}")
