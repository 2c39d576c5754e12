"""What a recipe's techniques gain on its own job: `ablate`, and `greedy_recipe` step by step.

Gradual optimisation tries one technique more at a time, and only what pays is kept:

  1. the techniques stand in an order: that of their slots, or of the gain each has alone
  2. the plan so far and the plan with one technique more are measured against each other
  3. the technique is kept if its whole interval lies above the noise floor, it was seen to act, and
     the model isn't worse; else the next one is tried without it

Each of the n techniques gets one chance, so one of n that do nothing would be kept by chance n
times as often. Holm's correction orders all p-values first, which nobody has while climbing; so
every decision is taken at its first and strictest threshold, a doubt of 5 % / n (Bonferroni): that
is never laxer than Holm's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.formatting import span
from hasten.measure.ablation import Design, Kind, Variant, Which, plans_of, with_second_baseline
from hasten.measure.recipe_experiment import ExperimentSubject, measured, prepared
from hasten.measure.statistics import Interval, paired_ratio, verdict
from hasten.progress import Audience, SilentProgress
from hasten.recipe.schema import Recipe
from hasten.report.build import experiment_report
from hasten.report.judgement import idle_techniques, quality, ratio_to, ratios_of
from hasten.report.markup import cell, markdown_table

DOUBT = 0.05  # of all decisions of a greedy search together
FLOOR = 0.01  # a gain that nobody should act on

# the plan so far, and with one technique more
Measure = Callable[[Plan, Plan], tuple[Variant, Variant]]


@dataclass(frozen=True)
class CumulativeStep:
    """One technique's chance: what was measured, and what became of it."""

    technique: str
    # Against the plan so far, with the interval of the decision; None: not measured.
    ratio: dict[str, float | None] | None
    kept: bool
    why: str


@dataclass(frozen=True)
class GreedySearch:
    """The plan that is left, how it came about, and its report against the baseline.

    ``report`` is None where nothing paid: then there is nothing to compare.
    """

    plan: Plan
    rungs: tuple[CumulativeStep, ...]
    report: dict[str, Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        sure = 100 * (1 - DOUBT / max(len(self.rungs), 1))
        rows = [["technique", f"times the plan so far [{sure:.3g} %]", "kept", "why"]]
        for rung in self.rungs:
            found = "not measured" if rung.ratio is None else span(rung.ratio, "times")
            rows.append([rung.technique, found, "yes" if rung.kept else "no", cell(rung.why)])
        return f"{markdown_table(rows)}\nkept: {self.plan if len(self.plan) else 'nothing'}"

    def rows(self) -> list[dict[str, Any]]:
        """The rungs as plain dictionaries, for a report."""
        return [asdict(rung) for rung in self.rungs]


def greedy_search(
    techniques: Sequence[Technique],
    measure: Measure,
    singles: Callable[[], Sequence[Variant]] | None = None,
) -> GreedySearch:
    """Try every technique on top of what was kept before it.

    In the order given, or where ``singles`` measures the baseline and each technique alone, by the
    gain of each.
    """
    if singles is not None and len(techniques) > 1:
        techniques = by_gain(techniques, singles())
    kept, rungs = Plan(), []
    for technique in techniques:
        wider = kept.with_(technique)
        rung = decide(technique, *measure(kept, wider), doubt=DOUBT / len(techniques))
        rungs.append(rung)
        kept = wider if rung.kept else kept
    return GreedySearch(kept, tuple(rungs))


def decide(technique: Technique, before: Variant, after: Variant, doubt: float) -> CumulativeStep:
    """Whether a technique stays, from the variant without it and the variant with it."""

    def rung(kept: bool, why: str, ratio: Interval | None = None) -> CumulativeStep:
        return CumulativeStep(str(technique), ratio.summary() if ratio else None, kept, why)

    ratios = ratios_of(after, before)
    if after.failed is not None:
        return rung(False, f"failed: {after.failed}")
    if not ratios:
        return rung(False, f"the plan so far has no result: {before.failed or 'no rounds'}")
    ratio = paired_ratio([1.0] * len(ratios), ratios, confidence=1 - doubt)
    ratio = (
        ratio
        if after.process_variance is None
        else after.process_variance.widened(ratio, confidence=1 - doubt)
    )
    if after.unfinished is not None:
        return rung(False, f"what it did is not known: {after.unfinished}", ratio)
    if technique.name() in idle_techniques(after):
        return rung(False, "it did not act", ratio)
    if quality(after, before)["verdict"] == "worse":
        return rung(False, quality(after, before)["text"], ratio)
    word = verdict(ratio, FLOOR)
    if word == "helped":
        return rung(True, f"at least {100 * (ratio.low - 1):.1f} % faster", ratio)
    lacks = "slower" if word == "hurt" else f"not shown to gain more than {100 * FLOOR:g} %"
    return rung(False, lacks, ratio)


def by_gain(techniques: Iterable[Technique], variants: Sequence[Variant]) -> list[Technique]:
    """Techniques in the order of the gain each had alone; those without a result come last."""
    gains = {}
    for variant in variants[1:]:
        ratio = ratio_to(variant, variants[0])
        if len(variant.plan) == 1 and ratio is not None:
            gains[variant.plan.techniques[0]] = ratio.estimate
    return sorted(techniques, key=lambda t: gains.get(t, 0.0), reverse=True)


# Measure a recipe's techniques on its own job, and report what each gains.

Order = Literal["slots", "gain"]


def ablate(
    recipe: Recipe | str | Path,
    variants: Which = "full",
    *,
    only: Sequence[str] = (),
    design: Design | None = None,
    title: str = "What the plan gains",
    command: str = "hasten.report.ablate",
    fresh: bool = False,
    audience: Audience | None = None,
    also: Callable[[ExperimentSubject], Mapping[str, Any]] = lambda subject: {},
) -> dict[str, Any]:
    """Measure a recipe's techniques on its own job; the report (docs/reference/metrics.md).

    Args:
        recipe: a recipe, or the path of one.
        variants: which plans are compared, see docs/speedup.md.
        only: techniques by name: variants that single out others are left out.
        design: how; eight rounds of four steps, and a second baseline, if left out.
        title: of the report.
        command: that repeats it.
        fresh: measure anew, whatever was measured before.
        audience: is told how it goes on.
        also: finds further arguments of `report_of` (verification, invariance, cost) beforehand.

    Raises:
        InputError: an unusable recipe, an empty plan, too small a budget.
    """
    audience, began = audience or SilentProgress(), time.monotonic()
    subject = prepared(recipe, audience, ranks=True)
    design = design or Design(noise=True, seed=subject.recipe.seed)
    plans, kinds = plans_of(subject.plan, variants, only)
    if design.noise:
        plans, kinds = with_second_baseline(plans, kinds)
    further = also(subject)
    found = measured(subject, plans, kinds, design, fresh, audience, began=began)
    return experiment_report(subject, found, design, title, command, further)


def greedy_recipe(
    recipe: Recipe | str | Path,
    *,
    order: Order = "slots",
    design: Design | None = None,
    title: str = "What gradual optimisation keeps",
    command: str = "hasten.gradual_optimize",
    fresh: bool = False,
    audience: Audience | None = None,
    also: Callable[[ExperimentSubject], Mapping[str, Any]] = lambda subject: {},
) -> GreedySearch:
    """LiveSetting the recipe's techniques on one at a time, measure each, keep what pays.

    Each decision is an experiment with an example of its own, so that a greedy search that was
    interrupted goes on. At the end the plan that is left is measured against the baseline.

    Args:
        recipe: a recipe, or the path of one; its plan lists the techniques in question.
        order: in that of the slots, or by the gain each has alone, which is measured first.
        design: of every experiment; a budget holds for each.
        title, command, fresh, audience, also, and what is raised: as for `ablate`.
    """
    audience = audience or SilentProgress()
    subject = prepared(recipe, audience, ranks=True)
    design = replace(design or Design(seed=subject.recipe.seed), noise=False)
    alone, singly = plans_of(subject.plan, "single")  # refuses an empty plan
    seconds: list[float] = []  # of each experiment on the way

    def variants(plans: Mapping[str, Plan], kinds: Mapping[str, Kind]) -> list[Variant]:
        found = measured(subject, plans, kinds, design, fresh, audience)
        seconds.append(found.design["seconds"])
        return found.variants

    def measure(before: Plan, after: Plan) -> tuple[Variant, Variant]:
        (new,) = set(after.techniques) - set(before.techniques)
        audience.tell(f"does {new} pay on top of: {before}?")
        names = {"so far": before, f"+ {new.name()}": after}
        found = variants(names, dict(zip(names, ("baseline", "cumulative"), strict=True)))
        return found[0], found[-1]

    singles = (lambda: variants(alone, singly)) if order == "gain" else None
    search = greedy_search(list(subject.plan), measure, singles)
    if not len(search.plan):
        return search
    plans, kinds = with_second_baseline(*plans_of(search.plan, "full"))
    further = also(subject)
    found = measured(subject, plans, kinds, design, fresh, audience)
    report = experiment_report(subject, found, design, title, command, further, sum(seconds))
    report["design"]["greedy"] = search.rows()
    return replace(search, report=report)
