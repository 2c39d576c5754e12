"""``plan: auto``: selects techniques by a comparison on the job itself.

It uses the job's own model, data and machine:

  1. The initial plan has the techniques that usually help and that the job supports
     (`hasten.recipe.candidates`).
  2. A comparison on the job itself: the initial plan next to variants with one change
     each. A change leaves a technique out, adds one, or replaces one in its slot.
     Significantly slower variants are dropped after three rounds.
  3. Changes that hurt or make no difference are dropped; changes that help join.
     Several changes together are compared once more with the initial plan and the best
     single change. The best of these is then compared with no technique at all.
  4. Of all plans that were compared, the plan with the highest lower bound of its
     interval wins.

If the training is too short for a comparison, the initial plan is used. A choice is
stored for jobs of the same model, data, settings, machine and versions.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hasten.core.context import JobContext
from hasten.core.plan import Plan, entry_of
from hasten.core.setup import prepare
from hasten.core.slot import Slot
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.formatting import duration
from hasten.machine.locks import one_measurement
from hasten.measure.ablation import Design, Variant
from hasten.measure.budget import GRACE
from hasten.measure.choice import Choice, ChoiceRow, choice_path, store_choice, stored_choice
from hasten.measure.recipe_experiment import (
    ExperimentSubject,
    compare_plans,
    prepared,
    recipe_worker,
    search_workers,
)
from hasten.measure.search import Proposal, search
from hasten.measure.significance import EffectVerdict, judge_effects, ratio_of_rounds
from hasten.measure.statistics import Interval, ProcessVariance, is_likely
from hasten.measure.workers import WorkerError, WorkerPool
from hasten.progress import Audience
from hasten.recipe.build import job_of, plan_of
from hasten.recipe.candidates import (
    TechniqueCandidate,
    candidates,
    expected_gain,
    first_plan,
    fits_in_memory,
    fitted_to_memory,
    with_document_attention,
)
from hasten.recipe.memory_check import largest_micro_batch, size_of
from hasten.recipe.schema import AutoPlan, Recipe
from hasten.techniques.layout.ddp import DDP

LONGEST_SECONDS, SHARE = 180.0, 0.05  # limits of a search: seconds, share of the training time
FIRST_SHARE = 0.65  # of the budget: the rest is for changes together, and no technique at all
FORECAST = 0.01  # of expected logarithms of speed: less is no promise
LEAST_UNSEEN = 0.96  # without such a forecast a technique within noise is left out, unless
# training without it may be slower than this
ALIKE = 0.02  # a technique is left out if training without it is at most this much slower (95 %)
PROBE_STEPS = 3
COMPARISON = Design(
    rounds=30, steps=3, warmup=2, longest_warmup=6, evaluations=0, eliminate=True, seed=1
)
PLAIN, FIRST, TOGETHER = "no techniques", "first plan", "all changes"


def choose(
    recipe: Recipe,
    audience: Audience,
    *,
    fresh: bool = False,
    more: Iterable[type[Technique]] = (),
    folder: Path | None = None,
    job: str = "recipe",
    prove: Callable[[Choice, ExperimentSubject], Choice] = lambda choice, subject: choice,
) -> Choice:
    """The plan for a recipe with ``plan: auto``; prepares the recipe's data on the way.

    Args:
        recipe: has ``auto_plan``; techniques of its plan stay in every choice.
        audience: receives the progress.
        fresh: compare again, even if a choice is stored.
        more: techniques in addition to the catalogue's.
        folder: folder of stored choices; default: in the user's cache.
        job: the worker's job. For one that imports the techniques of ``more``, see
            `hasten.measure.recipe_experiment.ExperimentSubject`.
        prove: receives a measured choice and the job; the choice that it returns is stored.

    Raises:
        InputError: an unusable recipe.
    """
    subject, settings, path = _job_of(recipe, audience, folder)
    if not fresh and (cached_choice := stored_choice(path)) is not None:
        return cached_choice
    comparison = PlanComparison(replace(subject, job=job), settings, audience, tuple(more))
    choice = comparison.run()
    if choice.source == "measured":
        choice = prove(choice, subject)
        store_choice(path, choice, subject.context, settings)
    return choice


def kept_choice(recipe: Recipe, audience: Audience, folder: Path | None = None) -> Choice | None:
    """The stored choice for a job with ``plan: auto``; None without a stored choice."""
    return stored_choice(_job_of(recipe, audience, folder)[2])


def _job_of(
    recipe: Recipe, audience: Audience, folder: Path | None
) -> tuple[ExperimentSubject, AutoPlan, Path]:
    """The prepared job, the settings of the choice, and the file of its choice."""
    settings = recipe.auto_plan or AutoPlan()
    subject = prepared(recipe.model_copy(update={"auto_plan": None}), audience, ranks=True)
    return subject, settings, choice_path(subject, settings, folder)


def choose_by_forecast(recipe: Recipe, context: JobContext, why: str) -> Choice:
    """The initial plan, for ranks that a launcher started, or without time for a comparison."""
    settings = recipe.auto_plan or AutoPlan()
    technique_candidates = candidates(recipe, context, settings.fidelity)
    base_plan = plan_of(recipe.model_copy(update={"auto_plan": None}), context)
    plan = first_plan(technique_candidates, base_plan, context)
    rows = _rows(technique_candidates)
    return Choice(_entries(plan, context), "forecast", f"{why}, so a forecast chose", rows)


class PlanComparison:
    """A choice while it is being made."""

    def __init__(
        self,
        subject: ExperimentSubject,
        settings: AutoPlan,
        audience: Audience,
        more: tuple[type[Technique], ...],
    ) -> None:
        self._subject, self._audience = subject, audience
        self._recipe, self._context = subject.recipe, subject.context
        self._size = size_of(self._recipe, self._context)  # builds the model's modules
        self._began = time.monotonic()
        self._candidates = candidates(self._recipe, self._context, settings.fidelity, more)
        self._plain = Plan(t for t in subject.plan if t.slot is not Slot.CHECKPOINT)
        saving = [t for t in subject.plan if t.slot is Slot.CHECKPOINT]
        self._saving = Plan(saving)  # joins the choice, and isn't compared
        first = first_plan(self._candidates, self._plain, self._context)
        self._slots = self._micro_batch(first)
        self._first, self._fitted = fitted_to_memory(
            first, self._recipe, self._context, self._slots
        )
        self._folder = Path(self._recipe.output) / "experiments" / "choice"
        self._plans = {FIRST: self._first, PLAIN: self._plain}  # by the names of their variants
        self._effects: dict[str, tuple[Interval, EffectVerdict]] = {}  # of the first comparison
        self._ratios: dict[str, Interval] = {}
        self._variance: ProcessVariance | None = None
        self._final: dict[str, list[float]] = {}  # rounds of the second one
        self._speeds: dict[str, list[float]] = {}
        self._best = ""  # by the second comparison
        self._phase = 0

    def run(self) -> Choice:
        """Compares the plans; if there is no comparison, the choice contains the reason.

        The search reserves the machine from its first comparison to its last. Otherwise another
        measurement could begin between two of them, and end after the budget.
        """
        # The initial plan with one change each, limited to the plans that memory holds; the least
        # certain change first: bf16, because no processor flag predicts its gain. Changes that may
        # help come next, then those that usually help; the largest forecast is the last of all.
        first, neighbours = self._first, dict[str, Plan]()
        gains = {technique: expected_gain(technique, self._context) for technique in first}
        for technique in sorted(first, key=gains.__getitem__):
            if technique.slot not in self._plain and not self._fitted:
                without = with_document_attention(first.without(technique))
                neighbours[f"without {technique.name()}"] = without
        for candidate in self._candidates:
            technique = candidate.technique
            taken = technique in first.techniques or technique.slot in self._plain
            if candidate.refused or taken:
                continue
            other = next((t for t in first if t.slot is technique.slot), None)
            base_plan = first if other is None else first.without(other)
            name = f"with {technique.name()}" + ("" if other is None else f" for {other.name()}")
            neighbours[name] = with_document_attention(base_plan.with_(technique), self._candidates)
        self._too_large = [n for n, p in neighbours.items() if not self._fits(p)]

        def openness(name: str) -> int:
            changed = set(neighbours[name]) ^ set(first)
            precise = any(technique.slot is Slot.PRECISION for technique in changed)
            return 0 if precise else 1 if name.startswith("with ") else 2

        fit = sorted((n for n in neighbours if n not in self._too_large), key=openness)
        self._changes = {name: neighbours[name] for name in fit}
        self._plans |= self._changes
        if not self._changes and self._first == self._plain:
            return self._forecast("no technique of the catalogue can serve speed here")
        longest = self._recipe.auto_budget or LONGEST_SECONDS
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(one_measurement(self._audience.tell, longest))
            except InputError:
                return self._forecast(
                    f"another measurement had this machine for more than {duration(longest)}"
                )
            self._began = time.monotonic()  # waiting is no part of the search
            pool = stack.enter_context(search_workers(self._subject, self._folder))
            self._budget, why = self._recipe.auto_budget or 0.0, ""
            if not self._budget:
                self._budget, why = self._own_budget(pool)
            if why:
                return self._forecast(why)
            self._audience.tell(
                f"plan: auto: comparing {len(self._changes)} changes of {self._first} for "
                f"{duration(self._budget)} at most"
            )
            self._audience.begin()
            search(self, partial(self._measure, pool))
        return self._choice()

    def _micro_batch(self, plan: Plan) -> int:
        """Slots of the largest micro-batch of the first steps."""
        data = self._subject.data
        if data is None:
            return 0
        if self._context.world.size > 1 and Slot.LAYOUT not in plan:
            plan = plan.with_(DDP())
        job = job_of(self._recipe, data, self._context, plan)
        self._steps = job.schedule.total_steps
        return largest_micro_batch(prepare(job, plan, self._context, Path(self._recipe.output)))

    def _own_budget(self, pool: WorkerPool) -> tuple[float, str]:
        """Seconds for the search, from a start of the first plan; or why there is no time."""
        self._audience.show("starting the first plan", 0.0)
        began = time.monotonic()
        spec = recipe_worker(self._subject, self._folder / "recipe.yaml", self._first)
        try:
            with pool.start(spec, "first-plan") as worker:
                worker.ready()
                start = time.monotonic() - began
                steps = worker.request("steps", 600.0, count=PROBE_STEPS)["steps"]
        except WorkerError as error:
            return 0.0, f"the first plan can't be started ({error})"
        step = statistics.median(s["step_seconds"] for s in steps[1:])
        training = self._steps * step
        budget = min(LONGEST_SECONDS, SHARE * training)
        least = 2 * start + 2 * 2 * COMPARISON.steps * step + sum(s["step_seconds"] for s in steps)
        if budget < least:
            return budget, (
                f"the training takes about {duration(training)}, too short to compare plans for "
                f"{duration(least)}"
            )
        return budget, ""

    def _fits(self, plan: Plan) -> bool:
        return fits_in_memory(plan, self._size, self._context, self._slots)

    def propose(self) -> Proposal[Plan] | None:
        """First every change by itself, then what they make together, and no technique at all."""
        self._phase += 1
        if self._phase == 1 and self._changes:
            return self._proposal((FIRST, *self._changes), FIRST_SHARE * self._budget)
        seconds_left = self._budget - (time.monotonic() - self._began)
        if self._phase > 2 or seconds_left <= 0:
            return None
        self._phase = 2
        best, changes = self._best_change()
        finals = [best, PLAIN]
        first = plan = self._first
        for other in (self._changes[name] for name in changes):
            for technique in first:
                if technique not in other.techniques and technique in plan.techniques:
                    plan = plan.without(technique)
            for technique in other:
                if technique not in first.techniques and technique.slot not in plan:
                    plan = plan.with_(technique)
        together = with_document_attention(plan)
        if len(changes) > 1 and together not in self._changes.values() and self._fits(together):
            self._plans[TOGETHER] = together
            finals = [TOGETHER, best, FIRST, PLAIN]
        if self._plans[best] == self._plain:
            return None
        return self._proposal(finals, seconds_left)

    def decide(self, variants: Sequence[Variant]) -> None:
        """Receives the results of the last comparison."""
        if self._phase == 1:
            self._effects, self._ratios = _effects(variants), _ratios(variants)
        else:
            self._final = {v.name: v.rounds for v in variants if v.rounds}
            self._variance = variants[0].process_variance
            if ratios := _ratios(variants):
                self._best = _best(ratios, reference=variants[0].name)
        self._speeds |= {v.name: v.rounds for v in variants if v.rounds}

    def _proposal(self, names: Iterable[str], seconds: float) -> Proposal[Plan]:
        design = replace(COMPARISON, budget_seconds=seconds / (1 + GRACE))
        return Proposal({name: self._plans[name] for name in dict.fromkeys(names)}, design)

    def _measure(self, pool: WorkerPool, proposal: Proposal[Plan]) -> list[Variant]:
        path, tell = self._folder / "recipe.yaml", self._audience.show
        plans, design = proposal.variants, proposal.design
        return compare_plans(self._subject, plans, design, pool, path, tell=tell).variants

    def _best_change(self) -> tuple[str, list[str]]:
        """The best plan with one change at most, and the changes that help or simplify."""
        founded = {t.name() for t in self._first if expected_gain(t, self._context) > FORECAST}
        ratios = self._ratios
        helped = {name for name, (_, verdict) in self._effects.items() if verdict.word == "helped"}
        changes, best = _changes(ratios, self._changes, founded, helped), _best(ratios)
        if len(changes) == 1 and best == FIRST:
            best = changes[0]  # alike without a technique, or likely to help
        return best, changes

    def _choice(self) -> Choice:
        if not self._effects and not self._best:
            return self._forecast("the budget was too short for a comparison")
        best = self._best or self._best_change()[0]
        plans, plan = self._plans, self._plans[best]
        chosen, plain = self._final.get(best, []), self._final.get(PLAIN, [])
        gain = None
        if chosen and plain and best != PLAIN:  # one that is out has fewer rounds
            ratios = [a / b for a, b in zip(chosen, plain, strict=False)]
            gain = ratio_of_rounds(ratios, self._variance).summary()
        others = {name: r.low for name, r in self._ratios.items() if plans[name] != plan}
        if plan != self._first:
            others[FIRST] = 1.0
        nearest = max(others, key=others.__getitem__, default=None)
        speeds = self._speeds.get(best)
        # How sure the choice is: what was compared, what is open, what had no time.
        count = len({*self._effects, *self._final, FIRST})
        compared = f"{count} plans in {duration(time.monotonic() - self._began)}"
        text = f"the fastest of {compared}"
        if unsure := sum(verdict.word == "undecided" for _, verdict in self._effects.values()):
            text = f"the best supported one of {compared} ({unsure} undecided)"
        if missed := len(self._changes) - len(self._effects):
            text += f"; no time for {missed} of {len(self._changes)} changes"
        return Choice(
            entries=_entries(Plan([*plan, *self._saving]), self._context),
            source="measured",
            why="; ".join(filter(None, (text, self._fitted))),
            rows=self._choice_rows(plan),
            gain=gain,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            next_best=None if nearest is None else _entries(plans[nearest], self._context),
            seconds=round(time.monotonic() - self._began, 1),
        )

    def _choice_rows(self, chosen: Plan) -> list[ChoiceRow]:
        """A row for every change that was compared, and for every candidate that wasn't."""
        rows, compared, first = list[ChoiceRow](), set[Technique](), set(self._first)
        for name, (ratio, verdict) in self._effects.items():
            gone, new = first - set(self._plans[name]), set(self._plans[name]) - first
            compared |= gone | new
            taken = not gone & set(chosen) and new <= set(chosen)
            rows.append(ChoiceRow(name, _decision(taken), verdict.text, ratio.summary()))
        rows += [ChoiceRow(n, "not taken", "memory would run out") for n in self._too_large]
        for candidate in self._candidates:
            if candidate.refused:
                rows.append(ChoiceRow(candidate.technique.name(), "left out", candidate.why))
            elif candidate.technique not in compared:
                decision = _decision(candidate.technique in chosen.techniques)
                why = f"no time to compare it; forecast: {candidate.why}"
                rows.append(ChoiceRow(candidate.technique.name(), decision, why))
        return rows

    def _forecast(self, why: str) -> Choice:
        plan = Plan([*self._first, *self._saving])
        reason = f"{why}, so a forecast chose" + (f" ({self._fitted})" if self._fitted else "")
        entries, rows = _entries(plan, self._context), _rows(self._candidates)
        seconds = round(time.monotonic() - self._began, 1)
        return Choice(entries, "forecast", reason, rows, seconds=seconds)


def _decision(taken: bool) -> str:
    return "taken" if taken else "not taken"


def _changes(
    ratios: Mapping[str, Interval],
    variants: Mapping[str, Plan],
    founded: Set[str],
    helped: Set[str],
) -> list[str]:
    """The changes of the initial plan that help, or that make it simpler at no loss.

    A change helps if the report of the same rounds lists it (``helped``), or if a gain is
    likely. A technique with a predicted gain (``founded``) stays until the measurement
    shows no gain. Any other technique is removed if no gain was measured.
    """
    helping = [n for n in variants if n in helped or (n in ratios and is_likely(ratios[n]))]
    alike = []
    for name in variants:
        ratio, technique = ratios.get(name), name.removeprefix("without ")
        if ratio is None or technique == name or name in helping or ratio.high < 1:
            continue
        if ratio.rounds < 2:  # one round says nothing about noise
            continue
        if ratio.low > 1 - ALIKE or (technique not in founded and ratio.estimate >= LEAST_UNSEEN):
            alike.append(name)
    best: dict[str, str] = {}  # by what is replaced: of two for one slot, the faster
    for name in sorted([*helping, *alike], key=lambda n: -ratios[n].low):
        best.setdefault(_about(name), name)
    return list(best.values())


def _about(change: str) -> str:
    for word in ("without ", " for "):
        if word in change:
            return change.rpartition(word)[2]
    return change


def _best(ratios: Mapping[str, Interval], reference: str = FIRST) -> str:
    """The plan with the highest lower bound; ``reference`` is what the others are compared with."""
    bounds = {reference: 1.0} | {name: ratio.low for name, ratio in ratios.items()}
    return max(bounds, key=bounds.__getitem__)


def _ratios(variants: Sequence[Variant]) -> dict[str, Interval]:
    """Speeds over the first plan's. Decisions allow for no process variance."""
    return {v.name: ratio_of_rounds(_by_round(v)) for v in variants if _by_round(v)}


def _by_round(variant: Variant) -> list[float]:
    if variant.failed or variant.kind == "baseline":
        return []
    return [a / b for a, b in zip(variant.rounds, variant.baseline_rounds, strict=False)]


def _effects(variants: Sequence[Variant]) -> dict[str, tuple[Interval, EffectVerdict]]:
    """Each measured change's ratio and verdict, as the report of the same rounds has them."""
    rounds = {v.name: _by_round(v) for v in variants if _by_round(v)}
    variance = variants[0].process_variance
    effects = {name: (ratio_of_rounds(r, variance), r) for name, r in rounds.items()}
    judged = judge_effects(effects, process_variance=variance)
    return {name: (ratio, judged[name]) for name, (ratio, _) in effects.items()}


def _rows(technique_candidates: Iterable[TechniqueCandidate]) -> list[ChoiceRow]:
    def decision(candidate: TechniqueCandidate) -> str:
        if candidate.refused:
            return "left out"
        return "taken" if candidate.usual else "not compared"

    return [ChoiceRow(c.technique.name(), decision(c), c.why) for c in technique_candidates]


def _entries(plan: Plan, context: JobContext) -> list[Any]:
    """Entries of a plan in recipe form, without the default layout of several ranks."""
    alone = context.world.size > 1
    return [entry_of(t) for t in plan if not (alone and t.name() == "ddp" and entry_of(t) == "ddp")]
