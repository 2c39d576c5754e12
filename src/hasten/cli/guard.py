"""``hasten guard``: the proofs of equal quality that a recipe's techniques owe, on its own job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hasten.cli.arguments import writable
from hasten.errors import FAILED, InputError
from hasten.measure.quality.guard import GuardDesign, Rows, guarded
from hasten.measure.quality.requirements import failures
from hasten.measure.recipe_experiment import ExperimentSubject, prepared
from hasten.progress import Display
from hasten.recipe.schema import load_recipe
from hasten.recipe.yaml_reader import read_duration


def guard(
    path: Path,
    overrides: Sequence[str],
    seeds: int,
    tokens: int,
    margin: float,
    json_out: Path | None,
    budget: str | None = None,
) -> int:
    """Prove, print the tables; exit code 4 if a proof failed."""
    if not 0 < margin < 1:
        raise InputError(f"--margin is {margin}; give a share above 0 and below 1, such as 0.01")
    writable("--json", json_out)
    seconds = None if budget is None else read_duration(budget)
    design = GuardDesign(seeds=seeds, tokens=tokens, margin=margin, budget_seconds=seconds)
    with Display() as display:
        subject = prepared(load_recipe(path, overrides), display, ranks=True)
        recipe, known, plan = subject.recipe, subject.known, subject.plan
        if not len(plan) and recipe.nproc == 1:
            raise InputError("plan: there is nothing to prove; list techniques under plan")
        found = guarded(recipe, known, plan, subject.data_key, design, display.tell)
    if json_out is not None:
        json_out.write_text(json.dumps(found, indent=1))
    show(found)
    return FAILED if failures(found) else 0


def beforehand(
    wanted: bool, seeds: int, fresh: bool, display: Display, budget_seconds: float | None = None
) -> Callable[[ExperimentSubject], Mapping[str, Any]]:
    """What an experiment's report says of the guard, found before the first arm starts."""

    def find(subject: ExperimentSubject) -> Mapping[str, Any]:
        if not wanted:
            return {}
        design, tell = GuardDesign(seeds=seeds, budget_seconds=budget_seconds), display.tell
        recipe, known, plan = subject.recipe, subject.known, subject.plan
        found = guarded(recipe, known, plan, subject.data_key, design, tell, fresh)
        for line in failures(found):
            display.tell(f"guard: FAIL {line}")
        return found

    return find


def show(found: Rows) -> None:
    """Two tables, for people."""
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    for title, key, names in (
        ("the plan as a whole", "invariance", ("what", "verdict", "text")),
        ("what each technique owes", "guard", ("technique", "fidelity", "verdict", "text")),
    ):
        table = Table(title=title, title_justify="left", show_edge=False, show_lines=False)
        for name in names:
            table.add_column(name, overflow="fold")
        for row in found[key]:
            table.add_row(*(str(row[name]) for name in names))
        console.print(table, "", sep="\n", markup=False)
    for line in failures(found):
        print(f"FAIL {line}")
