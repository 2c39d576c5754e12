"""``hasten guard``: the proofs of equal quality that a recipe's techniques owe, on its own job."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hasten.cli.arguments import writable
from hasten.cli.terminal import Display
from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import FAILED, InputError
from hasten.measure.budget import seconds_of
from hasten.measure.quality.guard import GuardDesign, guard_report
from hasten.measure.quality.requirements import failures
from hasten.measure.quality.runner import QualityRunner
from hasten.measure.recipe_experiment import ExperimentSubject, environment, prepared
from hasten.measure.record import key_of, source_digest
from hasten.recipe.build import batch_of
from hasten.recipe.schema import Recipe, load_recipe

STEPS = 50  # of a training with a seed, where --tokens says nothing
Rows = dict[str, list[dict[str, Any]]]


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
    seconds = None if budget is None else seconds_of(budget)
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


def guarded(
    recipe: Recipe,
    known: Facts,
    plan: Plan,
    data_key: str,
    design: GuardDesign,
    tell: Callable[[str], None],
    fresh: bool = True,
) -> Rows:
    """``report.invariance`` and ``report.guard`` of a recipe whose data lies ready.

    ``fresh`` proves anew; else what the same plan, data, design, machine and sources have proven
    before counts. Where a process died or hung, nothing is kept for later.

    Raises:
        InputError: the recipe asks for seeds with nothing held out.
    """
    lossy = any(t.fidelity is Fidelity.LOSSY for t in plan)
    if design.seeds and lossy and recipe.held_out == 0:
        raise InputError("held_out: seeds are compared by the held-out loss; hold records out")
    if design.seeds and not design.tokens:
        design = replace(design, tokens=tokens_of(recipe, known))
    folder = Path(recipe.output) / "data" / "guard"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{_key(recipe, known, plan, data_key, design)}.json"
    before = None if fresh else _kept(kept)
    if before is not None:
        tell(f"guard: proven before: {kept}")
        return before
    resolved = folder / "recipe.yaml"
    resolved.write_text(recipe.to_yaml())

    environ = partial(environment, known=known, transport=recipe.transport)
    budget = math.inf if design.budget_seconds is None else design.budget_seconds
    perform = QualityRunner(resolved, folder, environ, ranks=recipe.nproc, budget_seconds=budget)
    try:
        found = guard_report(plan, perform, design, tell, recipe.nproc, lambda: perform.left)
        if not perform.broken:
            temporary = kept.with_suffix(".new")
            temporary.write_text(json.dumps(found, indent=1))
            temporary.replace(kept)
        return found
    finally:  # gradients and checkpoints are large; orders, answers and logs stay
        for path in folder.glob("*.pt"):
            path.unlink()
        for path in folder.glob("arm-*"):
            shutil.rmtree(path, ignore_errors=True)


def _kept(path: Path) -> Rows | None:
    """What was proven before; None where nothing is, or nothing that can be read."""
    try:
        found: Rows = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


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


def _key(recipe: Recipe, known: Facts, plan: Plan, data_key: str, design: GuardDesign) -> str:
    """Of everything that a proof depends on."""
    return key_of(
        {
            "recipe": recipe.model_dump(mode="json", exclude={"price", "plan", "output"}),
            "data": data_key,
            "plan": plan.to_list(),
            "design": asdict(design),
            "hardware": {**asdict(known.hardware), "device": known.device},
            "versions": dict(known.versions),
            "source": source_digest(),
        }
    )


def tokens_of(recipe: Recipe, known: Facts) -> int:
    """Tokens of some steps of the recipe, or of all where it has fewer."""
    batch, records = batch_of(recipe), known.records
    of_step = batch.tokens or (batch.records or 1) * records.tokens / max(records.count, 1)
    limits = [STEPS * of_step]
    limits += [recipe.max_steps * of_step] if recipe.max_steps else []
    limits += [recipe.epochs * records.tokens] if recipe.epochs else []
    limits += [recipe.max_tokens] if recipe.max_tokens else []
    return max(int(min(limits)), 1)


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
