"""Runs one tuning: trials, final comparison with the start, winner.

The files are in `study_folder`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.machine import host
from hasten.machine.cache import key_of
from hasten.machine.locks import one_measurement
from hasten.measure.choose import kept_choice
from hasten.measure.recipe_experiment import prepared
from hasten.measure.record import ExperimentRecord
from hasten.progress import Audience, SilentProgress
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.yaml_reader import read_duration
from hasten.tune.bench import ReferencePair
from hasten.tune.report import is_fit, is_proven, result_sentence, study_document, winner_of
from hasten.tune.samplers import Proposer, proposer_of
from hasten.tune.space import Point
from hasten.tune.study import Search, Study
from hasten.tune.study_folder import StudyFolder, StudyResult
from hasten.tune.subjects import Prove, RecipeSubject, TuneOptions
from hasten.tune.surrogate import PlanGaussianProcess, importance


def tune(
    job: Recipe | Path | str,
    budget: str | float = "8m",
    options: TuneOptions | None = None,
    *,
    audience: Audience | None = None,
    prove: Prove | None = None,
) -> StudyResult:
    """Searches for the best settings of a recipe within a time budget.

    Args:
        job: a recipe or its path.
        budget: 90s, 8m, 1h30m or seconds, for trials and final comparison together.
        options: settings of the tuning.
        audience: receives the progress.
        prove: runs the verification and returns its objections to a plan with lossy
            techniques.

    Raises:
        InputError: the budget is too short, the job fails, or every trial does.
    """
    began = time.monotonic()
    options, audience = options or TuneOptions(), audience or SilentProgress()
    seconds = read_duration(str(budget))
    recipe = _as_chosen(job if isinstance(job, Recipe) else load_recipe(Path(job)), audience)
    subject = RecipeSubject(prepared(recipe, audience, ranks=True), options, audience, prove)
    return _Tuning(subject, seconds, options, audience, began).run()


def _as_chosen(recipe: Recipe, audience: Audience) -> Recipe:
    """With ``plan: auto``: the plan that was chosen before for this job, where one is kept.

    Without one, `prepared` takes the first plan.
    """
    choice = None if recipe.auto_plan is None else kept_choice(recipe, audience)
    if choice is None:
        return recipe
    audience.tell(f"{choice.sentence}; the study starts from there")
    return recipe.model_copy(update={"plan": choice.entries, "auto_plan": None})


class _Tuning:
    """A running tuning."""

    def __init__(
        self,
        subject: RecipeSubject,
        seconds: float,
        options: TuneOptions,
        audience: Audience,
        began: float,
    ) -> None:
        self._subject, self._seconds, self._options = subject, seconds, options
        self._audience, self._began = audience, began
        wishes = dataclasses.replace(options, trials=None, fresh=False)  # how much, not what
        key = key_of({"subject": subject.key(), "wishes": dataclasses.asdict(wishes)})
        self._folder = StudyFolder(subject.folder / key, key, audience)

    def run(self) -> StudyResult:
        document = self._folder.run(self._options.fresh, self._study, is_proven)
        space, winner = self._subject.space, document["winner"]
        settings = winner["settings"] if winner else document["start"]["settings"]
        text = self._subject.text(space.point(settings), [result_sentence(document)])
        if is_proven(document):
            self._folder.keep_best(text)
        return StudyResult(document, settings, text, self._folder.path)

    def _study(self, record: ExperimentRecord) -> dict[str, Any]:
        with one_measurement(self._audience.tell, self._seconds):
            self._audience.begin()
            with self._subject.opened(self._folder.path):
                study, remaining_seconds = self._search(record)
                document = self._judge(study, remaining_seconds)
        return {**document, "said": result_sentence(document)}

    def _search(self, record: ExperimentRecord) -> tuple[Study, float]:
        subject, options = self._subject, self._options

        def proposer(noise: float, memory: float | None) -> Proposer:
            prior = subject.prior_knowledge(noise, memory)
            return proposer_of(options.sampler, subject.space, prior, options.seed)

        cores, together = host.hardware().usable_cores, subject.together
        first, steps, seed = subject.space.start, options.steps, options.seed
        with ReferencePair(subject.start, first, cores, steps, seed, together=together) as bench:
            search = Search(
                subject.space,
                proposer,
                bench,
                record,
                objective=options.objective,
                budget_seconds=self._seconds,
                most=options.trials,
                tell=self._audience.show,
                on_trial=self._keep,
                began=self._began,
                room=lambda: subject.prior_knowledge(0.0, None).limit or math.inf,
            )
            study = search.run()
            return study, search.remaining_seconds

    def _keep(self, study: Study) -> None:
        """The best so far, on the disk before the next trial begins."""
        leader = next(iter(study.leaders(1)), None)
        value = study.tried[-1].value
        if leader is None or value is None or leader != study.tried[-1].point:
            return
        comments = [f"Best of {len(study.rows)} trials so far, not proven by a final comparison."]
        self._folder.keep_best(self._subject.text(leader, comments))

    def _judge(self, study: Study, remaining_seconds: float) -> dict[str, Any]:
        """The final comparison, and of its winners the best that nothing speaks against."""
        subject, leaders = self._subject, study.leaders()
        comparison: dict[str, Any] | None = None
        winner = None
        if leaders:

            def show(text: str) -> None:
                self._audience.show(text, 0.99)

            self._audience.show(
                f"final_comparison of {len(leaders)} with the start",
                1 - remaining_seconds / self._seconds,
            )
            comparison = subject.final_comparison(
                leaders, remaining_seconds, study.step_seconds, show
            )
            for index, leader in enumerate(leaders, start=2):
                comparison["variants"][index]["settings"] = subject.space.settings(leader)
            winner = self._winner(study, comparison, leaders)
        noise = max(study.noise, 0.01)
        measured = [(t.point, t.value) for t in study.tried if t.value is not None]
        points, values = [p for p, _ in measured], [v for _, v in measured]
        believed = PlanGaussianProcess(subject.space, noise=noise).after(points, values)
        shares = importance(subject.space, lambda wanted: believed(wanted).mean.tolist())
        about = {
            "title": subject.title,
            "unit": subject.unit,
            "sampler": self._options.sampler,
            "budget_seconds": self._seconds,
            "seconds": round(time.monotonic() - self._began, 1),
        }
        return study_document(study, subject.space, comparison, winner, shares, about)

    def _winner(
        self, study: Study, comparison: dict[str, Any], leaders: Sequence[Point]
    ) -> dict[str, Any] | None:
        rows = comparison["variants"]
        while (index := self._best_variant(study, rows)) is not None:
            point = leaders[index - 2]
            against = self._subject.refusal(point)
            if against is None:
                space = self._subject.space
                reduced, lost = self._subject.without(point, rows[index]["idle"])
                return {
                    "settings": space.settings(reduced),
                    "changes": space.changes(reduced),
                    "measured": space.changes(point),
                    "idle": lost,
                    "ratio": rows[index]["ratio"],
                    "of": "of the speed" + ", for less memory" * (study.objective == "memory"),
                    "verdict": rows[index]["verdict"],
                    "peak_memory_bytes": rows[index]["peak_memory_bytes"],
                }
            rows[index]["refused"] = against
        return None

    def _best_variant(self, study: Study, rows: Sequence[dict[str, Any]]) -> int | None:
        """Index of the best variant: by significant speed, or for memory, by the least memory.

        For memory, only usable variants that need less than the start count.
        """
        if study.objective != "memory":
            return winner_of(rows)
        base = rows[0]["peak_memory_bytes"] or study.memory
        fine = [
            i
            for i, row in enumerate(rows)
            if i >= 2 and is_fit(row) and base and (row["peak_memory_bytes"] or base) < 0.99 * base
        ]
        return min(fine, key=lambda i: rows[i]["peak_memory_bytes"], default=None)
