"""A recipe's learning rate, warm-up and batch, chosen by the eval loss of whole trainings.

What a training is: `whole_trainings`; how the search goes: `hasten.tune.learning`; the files:
`study_folder`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.measure.recipe_experiment import prepared
from hasten.measure.record import ExperimentRecord
from hasten.progress import Audience, SilentProgress
from hasten.recipe.schema import Recipe
from hasten.recipe.suggest import recipe_text
from hasten.recipe.yaml_reader import read_duration
from hasten.tune.learning import Learning, LearningResult
from hasten.tune.report import SCHEMA
from hasten.tune.space import Space, changes_text
from hasten.tune.study_folder import StudyFolder, StudyResult
from hasten.tune.surrogate import importance
from hasten.tune.whole_trainings import RecipeTrainings

# What a study of hyper-parameters leaves: its JSON and its result in a sentence.
#
# The JSON has the shape of a study of speed (docs/how-to/tune.md), so that the same page draws
# both: a trial's ``log_rate`` is the logarithm of the start's eval loss over its own.

CHOICES = ("learning_rate", "warmup", "batch")
SEED_NOISE = 0.003  # of a loss between seeds, as a logarithm, for the importance alone


def document(learnt: LearningResult, space: Space, about: Mapping[str, Any]) -> dict[str, Any]:
    """The study as plain values."""
    start_loss, ratio = float(learnt.rows[0]["loss"]), learnt.ratio
    winner = None
    if learnt.best is not None and ratio is not None and learnt.better and not learnt.unproven:
        winner = {
            "settings": space.settings(learnt.best),
            "changes": space.changes(learnt.best),
            "ratio": ratio.summary(),
        }
    trials = [
        {
            **row,
            "log_rate": None
            if row["loss"] is None
            else round(math.log(start_loss / row["loss"]), 6),
        }
        for row in learnt.rows
    ]
    fine = [
        (space.point(t["settings"]), t["log_rate"]) for t in trials if t["log_rate"] is not None
    ]
    return {
        "schema": SCHEMA,
        "study": "learning",
        **about,
        "ended": learnt.ended,
        "space": [{"name": d.name, "values": list(d.values)} for d in space.dimensions],
        "start": {"settings": space.settings(space.start), "loss": start_loss},
        "trials": trials,
        "final_comparison": _final_comparison(learnt),
        "pairs": learnt.pairs,
        "unproven": learnt.unproven,
        "winner": winner,
        "importance": importance(space, fine, SEED_NOISE),
    }


def learning_sentence(document: Mapping[str, Any]) -> str:
    """The result in a sentence or two."""
    states = [t["state"] for t in document["trials"]]
    pruned, failed = (states.count(s) for s in ("pruned", "failed"))
    count = f"{len(states)} trainings"
    count += f", {pruned} given up early" if pruned else ""
    count += f", {failed} failed" if failed else ""
    count += f"; {document['ended']}."
    winner = document["winner"]
    if winner is not None:
        ratio, pairs = winner["ratio"], document["pairs"]
        low, high = (f"{100 * (1 - 1 / ratio[k]):.2f}" for k in ("low", "high"))
        changed = changes_text(winner["changes"])
        mean = {k: math.fsum(p[k] for p in pairs) / len(pairs) for k in ("start", "best")}
        return (
            f"Eval loss {mean['start']:.4f} -> {mean['best']:.4f}, lower by {low} to {high} % "
            f"(95 %, {len(pairs)} fresh seeds, equal tokens) with {changed}. {count}"
        )
    if document["unproven"]:
        return f"Not proven ({document['unproven']}): the best so far is in best.yaml. {count}"
    if document["final_comparison"] is None:
        return f"No training had a lower loss: keep the values as they are. {count}"
    return f"No significant difference: keep the values as they are. {count}"


def _final_comparison(learnt: LearningResult) -> dict[str, Any] | None:
    if learnt.best is None:
        return None
    ratio = learnt.ratio
    if learnt.unproven is not None:
        verdict = f"undecided: {learnt.unproven}"
    elif learnt.better:
        verdict = "helped: a lower loss from fresh seeds"
    else:
        worse = ratio is not None and ratio.high < 1
        verdict = "hurt: a higher loss" if worse else "undecided: no certainly lower loss"
        verdict += " from fresh seeds"
    row = {
        "name": "the best again",
        "ratio": None if ratio is None else ratio.summary(),
        "verdict": verdict,
        "rounds": [p["start"] / p["best"] for p in learnt.pairs],
    }
    return {"variants": [row]}


# The study on a recipe.


def learn(
    recipe: Recipe | Path | str,
    budget: str | float = "1h",
    only: Sequence[str] = (),
    trials: int | None = None,
    fresh: bool = False,
    *,
    audience: Audience | None = None,
) -> StudyResult:
    """Searches for a lower eval loss at the same tokens within a time budget.

    Args:
        recipe: a recipe or its path; it decides the length of each training.
        budget: 30m, 2h or seconds, for trainings and pairs together.
        only: learning_rate, warmup, batch: the values to tune; default: all.
        trials: maximum number of trainings, without the pairs; None: as many as the budget
            holds.
        fresh: train again, even if results of an earlier start are stored.
        audience: receives the progress.

    Raises:
        InputError: an unknown name in ``only``, no trial, a budget that is too short, no eval
            data, or an unchanged job that fails.
    """
    for name in only:
        if name not in CHOICES:
            raise InputError(f"only: there is no {name!r} to learn; there are {', '.join(CHOICES)}")
    if trials is not None and trials < 2:
        raise InputError(f"trials is {trials}; the recipe's own training and one other are 2")
    began = time.monotonic()
    audience, seconds = audience or SilentProgress(), read_duration(str(budget))
    subject = prepared(recipe if isinstance(recipe, Recipe) else Path(recipe), audience)
    job = RecipeTrainings(subject, only)
    folder = StudyFolder(subject.recipe.output, job.key(), audience)

    def text_of(settings: Mapping[str, Any], comment: str) -> str:
        return recipe_text(job.recipe_at(job.space.point(settings)), subject.plan, comment)

    def keep(learnt: LearningResult) -> None:
        """The best so far, on the disk before the next training begins."""
        last = learnt.rows[-1]
        losses = [r["loss"] for r in learnt.rows if r["loss"] is not None]
        if last["loss"] is not None and last["loss"] <= min(losses):
            comment = f"Best of {len(learnt.rows)} trainings so far, not proven by pairs."
            folder.keep_best(text_of(last["settings"], comment))

    def study(record: ExperimentRecord) -> dict[str, Any]:
        audience.begin()
        search = Learning(
            job.space,
            job.begin,
            record,
            budget_seconds=seconds,
            looks=job.looks,
            most=trials,
            seed=subject.recipe.seed,
            tell=audience.show,
            on_training=keep,
            began=began,
        )
        with job.opened(folder.path):
            learnt = search.run()
        about = {
            "title": f"Learning of {subject.recipe.model}",
            "budget_seconds": seconds,
            "seconds": round(time.monotonic() - began, 1),
        }
        result = document(learnt, job.space, about)
        return {**result, "said": learning_sentence(result)}

    result = folder.run(fresh, study, lambda one: one["unproven"] is None)
    settings = (result["winner"] or result["start"])["settings"]
    text = text_of(settings, learning_sentence(result))
    if not result["unproven"]:  # else best.yaml keeps what the trainings found
        folder.keep_best(text)
    return StudyResult(result, settings, text, folder.path)
