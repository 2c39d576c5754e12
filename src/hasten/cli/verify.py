"""``hasten verify``: the checks of equal quality that a recipe's techniques require.

They run on the recipe's own job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.arguments import (
    AsJson,
    Budget,
    Overrides,
    RecipePath,
    output_option,
    text_to_stderr,
    writable,
)
from hasten.cli.output import say, show_table
from hasten.errors import FAILED, InputError
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.measure.quality.verification import Rows
    from hasten.measure.recipe_experiment import ExperimentSubject
    from hasten.progress import Display


def verify(
    path: RecipePath,
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=0, help="paired trainings for each lossy technique")
    ] = 0,
    tokens: Annotated[
        int, typer.Option(min=0, help="training tokens: of each pair; 0: those of 50 steps")
    ] = 0,
    margin: Annotated[float, typer.Option(help="allowed rise of the eval loss, as a share")] = 0.01,
    budget: Budget = None,
    output: Annotated[Path | None, output_option("a JSON file")] = None,
    as_json: AsJson = False,
) -> int:
    """Verify that a recipe's techniques keep model quality."""
    from hasten.measure.quality.requirements import failures
    from hasten.measure.quality.verification import VerificationDesign, verified
    from hasten.measure.recipe_experiment import prepared
    from hasten.progress import Display
    from hasten.recipe.schema import load_recipe
    from hasten.recipe.yaml_reader import read_duration

    if not 0 < margin < 1:
        raise InputError(f"--margin is {margin}; give a share above 0 and below 1, such as 0.01")
    writable("--output", output)
    seconds = None if budget is None else read_duration(budget)
    design = VerificationDesign(seeds=seeds, tokens=tokens, margin=margin, budget_seconds=seconds)
    with Display() as display:
        subject = prepared(load_recipe(path, overrides or []), display, ranks=True)
        if not len(subject.plan) and subject.recipe.nproc == 1:
            raise InputError("plan: there is nothing to prove; list techniques under plan")
        findings = verified(subject, design, display.tell)
    text = json.dumps(findings, indent=1)
    with text_to_stderr(as_json):
        show(findings)
    if as_json:
        say(text)
    if output is not None:
        write_result(output, text)
    return FAILED if failures(findings) else 0


def beforehand(
    wanted: bool, seeds: int, fresh: bool, display: Display, budget_seconds: float | None = None
) -> Callable[[ExperimentSubject], Mapping[str, Any]]:
    """Returns a function that runs the verification before the first variant starts.

    Its result goes into the experiment's report.
    """
    from hasten.measure.quality.requirements import failures
    from hasten.measure.quality.verification import VerificationDesign, verified

    def find(subject: ExperimentSubject) -> Mapping[str, Any]:
        if not wanted:
            return {}
        design = VerificationDesign(seeds=seeds, budget_seconds=budget_seconds)
        findings = verified(subject, design, display.tell, fresh)
        for line in failures(findings):
            display.tell(f"verification: FAIL {line}")
        return findings

    return find


def show(findings: Rows) -> None:
    """Prints two tables, and the failures."""
    from hasten.measure.quality.requirements import failures

    for title, key, names in (
        ("the plan as a whole", "invariance", ("what", "verdict", "text")),
        (
            "what each technique requires",
            "verification",
            ("technique", "fidelity", "verdict", "text"),
        ),
    ):
        show_table(names, [[str(row[name]) for name in names] for row in findings[key]], title)
        say()
    for line in failures(findings):
        say(f"FAIL {line}")
