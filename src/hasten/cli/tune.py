"""``hasten tune``: the best settings of a recipe within a budget of time, for speed or for loss."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.cli.arguments import WriteBack, copied, writable
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.data.file_lock import replace_file
from hasten.formatting import duration
from hasten.measure.quality.guard import GuardDesign, Rows, guarded
from hasten.measure.quality.requirements import failures
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.progress import Display
from hasten.recipe.price import Price
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.write_back import plain_entry
from hasten.tune.api import tune as tune_job
from hasten.tune.learning_study import LearningOptions
from hasten.tune.learning_study import learn as learn_job
from hasten.tune.report import says_of
from hasten.tune.samplers import Sampler
from hasten.tune.study import Objective
from hasten.tune.study_folder import StudyResult
from hasten.tune.subjects import TuneOptions


@dataclass(frozen=True)
class TuneArguments:
    """The command's options, as they were given."""

    budget: str
    sampler: Sampler
    objective: Objective
    only: str | None
    lossy: bool
    seeds: int
    trials: int | None
    steps: int
    fresh: bool


def tune(
    path: Path,
    overrides: Sequence[str],
    asked: TuneArguments,
    output: Path | None,
    json_out: Path | None,
    back: WriteBack | None = None,
) -> int:
    """Search, print the table, write the winning recipe; the exit code."""
    writable("--json", json_out)
    writable("--output", output)
    if back is not None and (back.asked or back.target):
        back.check()
    recipe = load_recipe(path, overrides)
    options = TuneOptions(
        asked.sampler,
        asked.objective,
        asked.lossy,
        named(asked.only),
        asked.trials,
        recipe.seed,
        asked.steps,
        asked.fresh,
    )
    with Display() as display:

        def prove(subject: ExperimentSubject, plan: Plan) -> Sequence[str]:
            display.tell("the guard looks at the winner; its trainings are beyond the budget")
            design = GuardDesign(seeds=asked.seeds)
            shown = subject.recipe.model_copy(update={"plan": plan.to_list()})
            found = guarded(
                shown, subject.known, plan, subject.data_key, design, display.tell, asked.fresh
            )
            return objections(found)

        found = tune_job(recipe, asked.budget, options, audience=display, prove=prove)
    target = output or Path(recipe.output) / "tuned.yaml"
    replace_file(target, found.text)
    copied(found.folder / "study.json", json_out)
    show(found, recipe.price, recipe.nproc)
    print(f"\nrecipe: {target}\nstudy: {found.folder / 'study.html'}")
    if back is not None:
        command = "hasten " + " ".join(shlex.quote(word) for word in sys.argv[1:])
        back.settle(_changed(recipe, load_recipe(target)), command)
    return 0


def _changed(before: Recipe, after: Recipe) -> dict[str, Any]:
    """The keys of the winner that differ from the recipe's, as a recipe writes them."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    found = {key: value for key, value in new.items() if value != old[key] and key != "auto_plan"}
    if "plan" in found or before.auto_plan is not None:
        found["plan"] = [plain_entry(entry) for entry in new["plan"]]
    return found


def objections(found: Rows) -> list[str]:
    """What speaks against a winner: what failed in the guard, and what it owes and wasn't shown."""
    owing = [
        row
        for row in found["guard"]
        if row["verdict"] == "not tested"
        or (row["verdict"] == "undecided" and row["fidelity"] == Fidelity.LOSSY.name)
    ]
    return [*failures(found), *(f"{row['technique']}: {row['text']}" for row in owing)]


def named(text: str | None) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def show(found: StudyResult, price: Price | None = None, devices: int = 1) -> None:
    """The duel as a table, and the result in a sentence; with a price what it saves."""
    report = found.report
    duel = report["duel"]
    if duel is not None:
        for row in duel["arms"]:
            print("  ".join((f"{row['name']:15}", _ratio(row), says_of(row))))
            if row.get("settings"):
                print(f"{'':17}{_changes(row['settings'], report['start']['settings'])}")
    print(f"\n{found}")
    winner = report["winner"]
    if winner and price is not None and winner["ratio"]["median"]:
        before = price.money(1e6 / report["start"]["rate"], devices)
        after = before / winner["ratio"]["median"]
        print(f"a million tokens: {before:.4g} {price.currency} before, {after:.4g} after")
    print(f"in {duration(report['seconds'])} of {duration(report['budget_seconds'])}")


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["ratio"] or {"median": None, "low": None}
    if ratio["median"] is None:
        return f"{'':22}"
    text = f"{ratio['median']:.3f}"
    if ratio["low"] is not None:
        text += f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return f"{text:22}"


def _changes(settings: dict[str, Any], start: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in settings.items() if start.get(k) != v)


# ``hasten tune --study learning``: learning rate, warm-up and batch by the held-out loss.


def learn(
    path: Path,
    overrides: Sequence[str],
    budget: str,
    options: LearningOptions,
    output: Path | None,
    json_out: Path | None,
) -> int:
    """Train, prove, print the trainings, write the winning recipe; the exit code."""
    writable("--json", json_out)
    writable("--output", output)
    recipe = load_recipe(path, overrides)
    with Display() as display:
        found = learn_job(recipe, budget, options, audience=display)
    target = output or Path(recipe.output) / "learnt.yaml"
    replace_file(target, found.text)
    copied(found.folder / "study.json", json_out)
    show_learning(found)
    print(f"\nrecipe: {target}\nstudy: {found.folder / 'study.html'}")
    return 0


def show_learning(found: StudyResult) -> None:
    """The trainings from the lowest loss on, the pairs, and the result in a sentence."""
    report = found.report
    for row in sorted(report["trials"], key=lambda t: (t["loss"] is None, t["loss"])):
        changed = ", ".join(f"{k}={v}" for k, v in row["changes"].items()) or "the recipe's own"
        loss = row["why"] if row["loss"] is None else f"{row['loss']:.4f}"
        print(f"{loss:26}  {changed}")
    for pair in report["pairs"]:
        print(f"seed {pair['seed']}: {pair['start']:.4f} -> {pair['best']:.4f}")
    print(f"\n{found}")
    print(f"in {duration(report['seconds'])} of {duration(report['budget_seconds'])}")
