"""``hasten tune --study learning``: learning rate, warm-up and batch by the held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hasten.cli.arguments import copied, writable
from hasten.cli.display import Display
from hasten.data.file_lock import replace_file
from hasten.formatting import duration
from hasten.recipe.schema import load_recipe
from hasten.tune.learning_study import Learned, LearningWishes
from hasten.tune.learning_study import learn as learn_job


def learn(
    path: Path,
    overrides: Sequence[str],
    budget: str,
    wishes: LearningWishes,
    output: Path | None,
    json_out: Path | None,
) -> int:
    """Train, prove, print the trainings, write the winning recipe; the exit code."""
    writable("--json", json_out)
    writable("--output", output)
    recipe = load_recipe(path, overrides)
    with Display() as display:
        found = learn_job(recipe, budget, wishes, audience=display)
    target = output or Path(recipe.output) / "learnt.yaml"
    replace_file(target, found.text)
    copied(found.folder / "study.json", json_out)
    show(found)
    print(f"\nrecipe: {target}\nstudy: {found.folder / 'study.html'}")
    return 0


def show(found: Learned) -> None:
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
