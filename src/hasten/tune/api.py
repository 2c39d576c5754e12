"""One tuning: trials, then the best beside the start, then the winner; files: `study_folder`."""

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
    """Search for the best settings of a recipe within a budget of time.

    Args:
        job: a recipe or its path.
        budget: 90s, 8m, 1h30m or seconds: for trials and final comparison together.
        options: how.
        audience: is told how it goes on.
        prove: finds what the verification has against a plan with lossy techniques.

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
    kept = None if recipe.auto_plan is None else kept_choice(recipe, audience)
    if kept is None:
        return recipe
    audience.tell(f"{kept.sentence}; the study starts from there")
    return recipe.model_copy(update={"plan": kept.entries, "auto_plan": None})


class _Tuning:
    """A tuning while it goes on."""

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
        asked = dataclasses.asdict(options)
        for name in ("trials", "fresh"):  # how much, not what
            asked.pop(name)
        self._key = key_of({"subject": subject.key(), "wishes": asked})
        self._folder = StudyFolder(subject.folder / self._key, self._key, audience)

    def run(self) -> StudyResult:
        folder, tell = self._folder, self._audience.tell
        with folder.opened(self._options.fresh) as record:
            if (earlier := folder.finished(record)) is not None:
                return self._result(earlier)
            if any(e["event"] == "trial" for e in record.events):
                tell(f"going on with {folder.path}")
            with one_measurement(tell, self._seconds):
                self._audience.begin()
                with self._subject.opened(folder.path):
                    study, left = self._search(record)
                    found = self._judge(study, left)
            found["said"] = result_sentence(found)
            result = self._result(found)
            folder.keep(found)
            if is_proven(found):
                record.append("done")  # else a second start has the final comparison
        return result

    def _search(self, record: ExperimentRecord) -> tuple[Study, float]:
        subject, options = self._subject, self._options

        def proposer(noise: float, memory: float | None) -> Proposer:
            known, tell = subject.known(noise, memory), self._audience.tell
            return proposer_of(options.sampler, subject.space, known, options.seed, tell)

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
                found=self._keep,
                began=self._began,
                room=lambda: subject.known(0.0, None).limit or math.inf,
            )
            study = search.run()
            return study, search.left

    def _keep(self, study: Study) -> None:
        """The best so far, on the disk before the next trial begins."""
        leader = next(iter(study.leaders(1)), None)
        value = study.tried[-1].value
        if leader is None or value is None or leader != study.tried[-1].point:
            return
        words = [f"Best of {len(study.rows)} trials so far, not proven by a final comparison."]
        self._folder.keep_best(self._subject.text(leader, words))

    def _judge(self, study: Study, left: float) -> dict[str, Any]:
        """The final comparison, and of its winners the best that nothing speaks against."""
        subject, leaders = self._subject, study.leaders()
        found: dict[str, Any] | None = None
        winner = None
        if leaders:

            def show(text: str) -> None:
                self._audience.show(text, 0.99)

            self._audience.show(
                f"final_comparison of {len(leaders)} with the start", 1 - left / self._seconds
            )
            found = subject.final_comparison(leaders, left, study.step_seconds, show)
            for place, leader in enumerate(leaders, start=2):
                found["variants"][place]["settings"] = subject.space.settings(leader)
            winner = self._winner(study, found, leaders)
        noise = max(study.noise, 0.01)
        seen = [(t.point, t.value) for t in study.tried if t.value is not None]
        points, values = [p for p, _ in seen], [v for _, v in seen]
        believed = PlanGaussianProcess(subject.space, noise=noise).after(points, values)
        shares = importance(subject.space, lambda wanted: believed(wanted).mean.tolist())
        about = {
            "title": subject.title,
            "unit": subject.unit,
            "sampler": self._options.sampler,
            "budget_seconds": self._seconds,
            "seconds": round(time.monotonic() - self._began, 1),
        }
        return study_document(study, subject.space, found, winner, shares, about)

    def _winner(
        self, study: Study, found: dict[str, Any], leaders: Sequence[Point]
    ) -> dict[str, Any] | None:
        rows = found["variants"]
        while (place := self._best_variant(study, rows)) is not None:
            point = leaders[place - 2]
            against = self._subject.refusal(point)
            if against is None:
                space = self._subject.space
                kept, lost = self._subject.without(point, rows[place]["idle"])
                return {
                    "settings": space.settings(kept),
                    "changes": space.changes(kept),
                    "measured": space.changes(point),
                    "idle": lost,
                    "ratio": rows[place]["ratio"],
                    "of": "of the speed" + ", for less memory" * (study.objective == "memory"),
                    "verdict": rows[place]["verdict"],
                    "peak_memory_bytes": rows[place]["peak_memory_bytes"],
                }
            rows[place]["refused"] = against
        return None

    def _best_variant(self, study: Study, rows: Sequence[dict[str, Any]]) -> int | None:
        """By speed beyond doubt; for memory, the least of those that are fit and need less."""
        if study.objective != "memory":
            return winner_of(rows)
        base = rows[0]["peak_memory_bytes"] or study.memory
        fine = [
            i
            for i, row in enumerate(rows)
            if i >= 2 and is_fit(row) and base and (row["peak_memory_bytes"] or base) < 0.99 * base
        ]
        return min(fine, key=lambda i: rows[i]["peak_memory_bytes"], default=None)

    def _result(self, found: dict[str, Any]) -> StudyResult:
        space = self._subject.space
        winner = found["winner"]
        settings = winner["settings"] if winner else found["start"]["settings"]
        text = self._subject.text(space.point(settings), [result_sentence(found)])
        if is_proven(found):
            self._folder.keep_best(text)
        return StudyResult(found, settings, text, self._folder.path)
