"""Tunes a recipe for speed or memory: trials, a final comparison with the start, the winner.

The points of the search are plans. The folder OUTPUT/studies/KEY has these files:

- record.jsonl: every trial; another start resumes from it
- best.yaml: the recipe with the best settings so far
- study.json: the finished study

KEY is a hash of everything that decides the results: recipe, data, space, machine,
versions and options.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.formatting import did_you_mean
from hasten.machine import processes
from hasten.machine.cache import key_of
from hasten.machine.files import write_atomic
from hasten.machine.locks import alone_in, one_measurement
from hasten.measure.ablation import Variant, check_turns
from hasten.measure.choose import kept_choice
from hasten.measure.experiment import SHARE
from hasten.measure.recipe_experiment import (
    ExperimentSubject,
    compare_plans,
    prepared,
    search_workers,
)
from hasten.measure.record import ExperimentRecord
from hasten.measure.search import Proposal, search
from hasten.measure.workers import WorkerPool
from hasten.progress import Audience, SilentProgress
from hasten.recipe.build import batch_of, mixed_layouts
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.shorthands import catalogue
from hasten.recipe.suggest import recipe_text
from hasten.recipe.yaml_reader import read_duration
from hasten.tune.report import best_row, final_rows, is_proven, result_sentence, study_document
from hasten.tune.samplers import PriorKnowledge, Proposer, Sampler, proposer_of
from hasten.tune.space import Point, plan_space
from hasten.tune.study import Objective, Study


@dataclass(frozen=True)
class TuneOptions:
    """Options of a tuning.

    Args:
        sampler: the proposer of points; auto: hasten's own order.
        objective: tokens (tokens per second), or memory.
        lossy: include techniques that change the mathematics, if they pass the
            verification.
        only: names of slots or techniques to tune.
        trials: most trials; None: as many as the budget allows.
        seed: seed of all random numbers.
        steps: steps of a round.
        fresh: measure again, even if results of an earlier start are stored.

    Raises:
        InputError: an unknown sampler or objective.
    """

    sampler: Sampler = "auto"
    objective: Objective = "tokens"
    lossy: bool = False
    only: tuple[str, ...] = ()
    trials: int | None = None
    seed: int = 0
    steps: int = 4
    fresh: bool = False

    def __post_init__(self) -> None:
        for name, word, kind in (
            ("sampler", self.sampler, Sampler),
            ("objective", self.objective, Objective),
        ):
            choices = get_args(kind)
            if word not in choices:
                raise InputError(
                    f"{name}: there is no {word!r}{did_you_mean(word, choices)}; there are "
                    f"{', '.join(choices)}"
                )


@dataclass(frozen=True)
class StudyResult:
    """A study's result; `str` is one sentence about it.

    ``settings`` are those to use: the winner's, or the start's if nothing was significantly
    better. ``text`` is the recipe with these settings.
    """

    report: dict[str, Any]
    settings: dict[str, Any]
    text: str
    folder: Path

    @property
    def better(self) -> bool:
        """Returns True if a point was significantly better."""
        return self.report["winner"] is not None

    def __str__(self) -> str:
        return str(self.report["said"])


Prove = Callable[[ExperimentSubject, Plan], Sequence[str]]


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
    subject = prepared(recipe, audience, ranks=True)
    return Tuning(subject, options, audience, seconds, began, prove).run()


def _as_chosen(recipe: Recipe, audience: Audience) -> Recipe:
    """Returns the recipe with the stored choice of ``plan: auto`` for this job, if there is one.

    Otherwise `prepared` uses the first plan.
    """
    choice = None if recipe.auto_plan is None else kept_choice(recipe, audience)
    if choice is None:
        return recipe
    audience.tell(f"{choice.sentence}; the study starts from there")
    return recipe.model_copy(update={"plan": choice.entries, "auto_plan": None})


class Tuning:
    """A running tuning of a recipe with prepared data.

    Args:
        subject: the recipe and its context.
        options: settings of the tuning.
        audience: receives the progress.
        seconds: the budget.
        began: start of the budget, on the clock.
        prove: see `tune`.
    """

    def __init__(
        self,
        subject: ExperimentSubject,
        options: TuneOptions,
        audience: Audience,
        seconds: float = math.inf,
        began: float = 0.0,
        prove: Prove | None = None,
    ) -> None:
        recipe, context = subject.recipe, subject.context
        self._subject, self._options, self._audience = subject, options, audience
        self._seconds, self._began, self._prove = seconds, began, prove
        # A micro-batch is at most half a step; its size is tuned in examples, never in tokens.
        most = max((batch_of(recipe).examples or 64) // 2, 1)
        bounds = {
            "gradient_accumulation.micro_batch_size": (1, most),
            "gradient_accumulation.micro_batch_tokens": (1, 0),
        }
        self._plans = plan_space(
            catalogue(),
            subject.plan,
            context,
            bounds,
            options.lossy,
            options.only,
            mixed_layouts(recipe.nproc),
        )
        self.space = replace(self._plans.space, refuse=self._refused)
        # With several ranks a turn has all steps, because some techniques communicate in one only.
        self.together = 1 if recipe.nproc == 1 else options.steps
        wishes = replace(options, trials=None, fresh=False)  # without options that change no result
        decisive = {
            "recipe": recipe.model_dump(mode="json", exclude={"price", "output"}),
            "data": subject.data_key,
            "space": [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions],
            "hardware": {**asdict(context.hardware), "device": context.device},
            "versions": dict(context.versions),
            "wishes": asdict(wishes),
        }
        self._key = key_of(decisive)
        self.folder = Path(recipe.output) / "studies" / self._key

    def run(self) -> StudyResult:
        """Searches, or reads the study that an earlier start has finished."""
        document = self._document()
        settings = (document["winner"] or document["start"])["settings"]
        text = self.text(self.space.point(settings), result_sentence(document))
        if is_proven(document):
            write_atomic(self.folder / "best.yaml", text)
        return StudyResult(document, settings, text, self.folder)

    def _document(self) -> dict[str, Any]:
        """Returns the study's JSON; measures if no earlier start has finished the study."""
        record_path, path = self.folder / "record.jsonl", self.folder / "study.json"
        with alone_in(self.folder, self._audience.tell):
            if self._options.fresh:
                record_path.unlink(missing_ok=True)
            with ExperimentRecord(record_path, self._key) as record:
                if record.done and path.is_file():
                    self._audience.tell(f"studied before: {self.folder} (--fresh measures again)")
                    return read_json_object(path, "study")
                if any(event["event"] == "trial" for event in record.events):
                    self._audience.tell(f"resuming {self.folder}")
                document = self._study(record)
                document["said"] = result_sentence(document)
                write_atomic(path, json.dumps(document, indent=1))
                if is_proven(document):
                    record.append("done")
        return document

    def _study(self, record: ExperimentRecord) -> dict[str, Any]:
        study = Study(
            self.space,
            self._proposer,
            record,
            objective=self._options.objective,
            steps=self._options.steps,
            together=self.together,
            seed=self._options.seed,
            budget_seconds=self._seconds,
            most=self._options.trials,
            tell=self._audience.show,
            on_trial=self._keep,
            began=self._began,
        )
        likely = self.space.summit(self._plans.gain, self._options.seed)
        with (
            one_measurement(self._audience.tell, self._seconds),
            search_workers(self._subject, self.folder) as pool,
        ):
            pool.warm_up(self._subject.environment(self._plans.plan(likely)))
            self._audience.begin()
            search(study, lambda proposal: self.compare(proposal, pool))
        # The study's JSON, with the best winner that the verification accepts.
        comparison = winner = None
        if study.final:
            comparison = final_rows(study.final)
            for row in comparison["variants"]:
                if row["name"] in study.choices:
                    row["settings"] = self.space.settings(study.choices[row["name"]])
            winner = self._winner(study, comparison["variants"])
        about = {
            "title": f"Tuning of {self._subject.recipe.model}",
            "unit": "tokens/s",
            "sampler": self._options.sampler,
            "budget_seconds": self._seconds,
            "seconds": round(time.monotonic() - self._began, 1),
        }
        return study_document(study, comparison, winner, about)

    def compare(self, proposal: Proposal[Point], pool: WorkerPool) -> list[Variant]:
        """Measures one comparison of the study."""
        plans = {name: self._plans.plan(point) for name, point in proposal.variants.items()}
        return compare_plans(
            self._subject, plans, proposal.design, pool, self.folder / "recipe.yaml"
        ).variants

    def _proposer(self, noise: float, memory: float | None) -> Proposer:
        # The predictions of the techniques, and the limit by free memory.
        context = self._subject.context
        free = processes.available_bytes(context.hardware.memory_limit_bytes)
        free //= self._subject.recipe.nproc  # the predicted peak is that of one rank
        if not context.device.startswith("cpu"):
            free = min((g.memory_bytes for g in context.hardware.accelerators), default=free)
            free -= int(memory or 0)
        first = self._plans.resident(self.space.start)

        def peak(point: Point) -> float:
            assert memory is not None
            return max(memory + self._plans.resident(point) - first, 0.1 * memory)

        known_peak = None if memory is None else peak
        prior = PriorKnowledge(self._plans.gain, known_peak, SHARE * free, noise)
        return proposer_of(self._options.sampler, self.space, prior, self._options.seed)

    def _keep(self, study: Study) -> None:
        """Writes the best settings so far, before the next trial begins."""
        last = study.tried[-1]
        if last.score is not None and study.leaders(1) == [last.point]:
            comment = f"Best of {len(study.rows)} trials so far, not proven by a final comparison."
            write_atomic(self.folder / "best.yaml", self.text(last.point, comment))

    def text(self, point: Point, comment: str) -> str:
        """Returns the text of the recipe with a point's plan."""
        return recipe_text(self._subject.recipe, self._plans.plan(point), comment)

    def _refused(self, point: Point) -> str | None:
        """Returns the reason why a point is refused.

        With several ranks, turns that would hide the cost of communication are refused, too.
        """
        reason = self._plans.space.refuse(point)
        if reason is not None or self._subject.recipe.nproc == 1:
            return reason
        try:
            check_turns({"trial": self._plans.plan(point)}, self._options.steps)
        except InputError as error:
            return str(error)
        return None

    def _winner(self, study: Study, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        while (row := best_row(rows, study.objective, study.start["memory"])) is not None:
            point = study.choices[row["name"]]
            if (against := self.refusal(point)) is not None:
                row["refused"] = against
                continue
            reduced, lost = self._plans.without(point, row["idle"])
            return {
                "settings": self.space.settings(reduced),
                "changes": self.space.changes(reduced),
                "measured": self.space.changes(point),
                "idle": lost,
                "ratio": row["ratio"],
                "of": "of the speed" + ", for less memory" * (study.objective == "memory"),
                "verdict": row["verdict"],
                "peak_memory_bytes": row["peak_memory_bytes"],
            }
        return None

    def refusal(self, point: Point) -> str | None:
        """Returns the verification's objection to lossy techniques that the recipe didn't have."""
        plan = self._plans.plan(point)
        recipe_techniques = set(self._subject.plan)
        new = [t for t in plan if t.fidelity is Fidelity.LOSSY and t not in recipe_techniques]
        if not new:
            return None
        if self._prove is None:
            return f"{new[0]} changes the mathematics, and its quality wasn't verified"
        try:
            return next(iter(self._prove(self._subject, plan)), None)
        except InputError as error:  # the study is not lost for it
            return f"{new[0]} changes the mathematics, and can't be verified here: {error}"
