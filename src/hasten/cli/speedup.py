"""``hasten speedup``: the recipe's techniques against the baseline, on the recipe's own job."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.cli.display import Display
from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.evidence.ablation import Design, compare
from hasten.evidence.findings import report_of
from hasten.evidence.report import render_markdown, write_report
from hasten.recipe.ceiling import mfu_words
from hasten.recipe.schema import Recipe, load_recipe
from hasten.run import ready


def speedup(
    path: Path,
    overrides: Sequence[str],
    arms: str,
    rounds: int,
    steps: int,
    warmup: int,
    json_out: Path | None,
) -> None:
    """Measure, print the table, write the report."""
    recipe = load_recipe(path, overrides)
    design = Design(rounds=rounds, steps=steps, warmup=warmup, seed=recipe.seed)
    command = "hasten " + " ".join(shlex.quote(word) for word in sys.argv[1:])
    with Display() as display:
        report = measure(
            recipe, arms, design, f"What the plan gains: {path.stem}", command, display
        )
    page = write_report(report, Path(recipe.output))
    if json_out is not None:
        shutil.copyfile(page.with_name("report.json"), json_out)
    print(render_markdown(report))
    print(f"report: {page}")


def measure(
    recipe: Recipe, arms: str, design: Design, title: str, command: str, display: Display
) -> dict[str, Any]:
    """Run the experiment of a recipe; the report as a dictionary.

    Raises:
        InputError: the plan is empty, or the recipe asks for several ranks.
    """
    if recipe.nproc > 1:
        raise InputError("nproc: arms of one process each are compared; set nproc: 1")
    known, plan, _ = ready(recipe, display.tell, _tokenising(display))
    plans = _plans(plan, arms)
    output = Path(recipe.output)
    resolved = output / "data" / "arms.yaml"
    resolved.write_text(_with_steps(recipe, design).to_yaml())
    display.begin()
    measured = compare(
        resolved,
        plans,
        environ=lambda p: environment(p, known),
        folder=output / "data",
        design=design,
        tell=display.show,
    )
    price = recipe.price
    return report_of(
        measured,
        title=title,
        command=command,
        hardware={**asdict(known.hardware), "device": known.device},
        versions=known.versions,
        recipe=recipe.model_dump(mode="json"),
        currency=price.currency if price else None,
        per_device_hour=price.per_device_hour if price else 0.0,
        mfu=mfu_words(recipe, known),
    )


def environment(plan: Plan, known: Facts) -> Mapping[str, str]:
    """What an arm's process starts with: waiting threads sleep, then the techniques' own wishes."""
    found = {"OMP_WAIT_POLICY": "PASSIVE"}  # arms share the cores; spinning would slow the others
    for technique in plan:
        found |= technique.environ(known)
    return found


def _plans(plan: Plan, arms: str) -> dict[str, Plan]:
    if not len(plan):
        raise InputError("plan: there is nothing to compare; list techniques under plan")
    if arms == "ladder":
        return plan.ladder()
    return plan.arms() if arms == "all" else {"baseline": Plan(), "plan": plan}


def _with_steps(recipe: Recipe, design: Design) -> Recipe:
    """The recipe, its length and learning-rate schedule those of the experiment."""
    return recipe.model_copy(
        update={"max_steps": design.steps_in_all, "epochs": None, "max_tokens": None}
    )


def _tokenising(display: Display) -> Any:
    return lambda done, total: display.show(
        f"tokenising {done:,}/{total:,} records", done / max(total, 1)
    )
