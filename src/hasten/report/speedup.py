"""Measures a recipe's techniques on its own job: `ablate` and `greedy_recipe`.

Gradual optimisation tries one technique more at a time, and keeps only techniques that
pay:

  1. The techniques have an order: that of their slots, or of the gain each has alone.
  2. The plan so far is compared with the plan plus one technique.
  3. The technique is kept if its whole interval is above the noise floor, its effect
     was observed, and the model isn't worse. Otherwise the next technique is tried
     without it.

Each of the n techniques gets one chance. Without a correction, one without effect would
be kept by chance n times as often. Holm's correction requires all p-values in order,
which aren't available during the search. Every decision therefore uses its first and
strictest threshold, an error probability of 5 % / n (Bonferroni). That is never less
strict than Holm's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.formatting import span
from hasten.measure.ablation import Design, Kind, Variant, Which, plans_of, with_second_baseline
from hasten.measure.budget import rounded_up
from hasten.measure.recipe_experiment import ExperimentSubject, measured, prepared
from hasten.measure.search import Proposal, search
from hasten.measure.significance import ratio_of_rounds
from hasten.measure.statistics import Interval, verdict
from hasten.progress import Audience, SilentProgress
from hasten.recipe.schema import Recipe
from hasten.report.build import experiment_report
from hasten.report.judgement import idle_techniques, quality, ratio_to, ratios_of
from hasten.report.markup import cell, markdown_table

DOUBT = 0.05  # of all decisions of a greedy search together
FLOOR = 0.01  # a gain that nobody should act on

Order = Literal["slots", "gain"]


@dataclass(frozen=True)
class CumulativeStep:
    """One technique's chance: what was measured, and what became of it."""

    technique: str
    # Against the plan so far, with the interval of the decision; None: not measured.
    ratio: dict[str, float | None] | None
    accepted: bool
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
            ratio_text = "not measured" if rung.ratio is None else span(rung.ratio, "times")
            decision = "yes" if rung.accepted else "no"
            rows.append([rung.technique, ratio_text, decision, cell(rung.why)])
        return f"{markdown_table(rows)}\nkept: {self.plan if len(self.plan) else 'nothing'}"

    def rows(self) -> list[dict[str, Any]]:
        """The rungs as plain dictionaries, for a report."""
        return [
            {"technique": r.technique, "ratio": r.ratio, "kept": r.accepted, "why": r.why}
            for r in self.rungs
        ]


class Greedy:
    """The rules of a greedy search: every technique on top of what was kept before it.

    Args:
        techniques: the techniques to try.
        design: settings of every comparison.
        order: that of the list, or by the gain of each alone, which is measured first.

    Raises:
        InputError: an unknown order.
    """

    def __init__(
        self, techniques: Sequence[Technique], design: Design, order: Order = "slots"
    ) -> None:
        if order not in get_args(Order):
            orders = ", ".join(get_args(Order))
            raise InputError(f"order: there is no {order!r}; there are {orders}")
        self._waiting, self._design = list(techniques), design
        self._doubt = DOUBT / max(len(techniques), 1)
        self._singles = order == "gain" and len(techniques) > 1
        self.result = GreedySearch(Plan(), ())

    def propose(self) -> Proposal[Plan] | None:
        """The plan so far, and the same with the next technique."""
        plan = self.result.plan
        tried = self._waiting if self._singles else self._waiting[:1]
        wider = {f"+ {technique.name()}": plan.with_(technique) for technique in tried}
        return Proposal({"so far": plan, **wider}, self._design) if tried else None

    def decide(self, variants: Sequence[Variant]) -> None:
        """Keeps the technique, or not."""
        if self._singles:
            self._waiting, self._singles = by_gain(self._waiting, variants), False
            return
        technique, before = self._waiting.pop(0), variants[0]
        plan = self.result.plan.with_(technique)
        unmeasured = Variant(technique.name(), plan, failed="there was no time for it")
        after = variants[-1] if len(variants) > 1 else unmeasured
        rung = decide(technique, before, after, self._doubt)
        rungs = (*self.result.rungs, rung)
        self.result = GreedySearch(plan if rung.accepted else self.result.plan, rungs)


def decide(technique: Technique, before: Variant, after: Variant, doubt: float) -> CumulativeStep:
    """Decides if a technique stays, from the variants without it and with it."""

    def rung(is_retained: bool, why: str, ratio: Interval | None = None) -> CumulativeStep:
        return CumulativeStep(str(technique), ratio.summary() if ratio else None, is_retained, why)

    ratios = ratios_of(after, before)
    if after.failed is not None:
        return rung(False, f"failed: {after.failed}")
    if not ratios:
        return rung(False, f"the plan so far has no result: {before.failed or 'no rounds'}")
    ratio = ratio_of_rounds(ratios, after.process_variance, confidence=1 - doubt)
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


def ablate(
    recipe: Recipe | str | Path,
    variants: Which = "full",
    *,
    only: Sequence[str] = (),
    design: Design | None = None,
    title: str = "What the plan gains",
    command: str = "hasten.report.speedup.ablate",
    fresh: bool = False,
    audience: Audience | None = None,
    also: Callable[[ExperimentSubject], Mapping[str, Any]] = lambda subject: {},
) -> dict[str, Any]:
    """Measures a recipe's techniques on its own job; the report (docs/reference/metrics.md).

    Args:
        recipe: a recipe, or the path of one.
        variants: the plans to compare, see docs/tutorials/which-technique-pays.md.
        only: names of techniques; variants that single out others are left out.
        design: settings; default: eight rounds of four steps, and a second baseline.
        title: title of the report.
        command: command that repeats the experiment.
        fresh: measure again, even if results are stored.
        audience: receives the progress.
        also: supplies further arguments of `report_of` (verification, invariance, cost)
            beforehand.

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
    experiment = measured(subject, plans, kinds, design, fresh, audience, began=began)
    if design.budget_seconds is not None and not any(v.rounds for v in experiment.variants):
        raise InputError(
            f"budget: {rounded_up(design.budget_seconds)} is too short: it was over before the "
            "first round; give several times as much"
        )
    return experiment_report(subject, experiment, design, title, command, further)


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
    """Adds the recipe's techniques one at a time, measures each, and keeps those that pay.

    Each decision is an experiment with a record of its own. An interrupted greedy search
    therefore resumes. At the end the remaining plan is compared with the baseline.

    Args:
        recipe: a recipe, or the path of one; its plan lists the techniques to try.
        order: the order of the slots, or by the gain each has alone, which is measured
            first.
        design: settings of every experiment; a budget applies to each.
        title, command, fresh, audience, also: as for `ablate`, as are the errors raised.
    """
    audience = audience or SilentProgress()
    subject = prepared(recipe, audience, ranks=True)
    design = replace(design or Design(seed=subject.recipe.seed), noise=False)
    plans_of(subject.plan, "single")  # refuses an empty plan
    seconds: list[float] = []  # of each experiment on the way

    def measure(proposal: Proposal[Plan]) -> list[Variant]:
        base, *others = proposal.variants
        audience.tell(f"on top of {proposal.variants[base]}, what pays of {', '.join(others)}?")
        kinds: dict[str, Kind] = {base: "baseline", **dict.fromkeys(others, "cumulative")}
        outcome = measured(subject, proposal.variants, kinds, proposal.design, fresh, audience)
        seconds.append(outcome.design["seconds"])
        return outcome.variants

    rules = Greedy(list(subject.plan), design, order)
    search(rules, measure)
    greedy = rules.result
    if not len(greedy.plan):
        return greedy
    plans, kinds = with_second_baseline(*plans_of(greedy.plan, "full"))
    further = also(subject)
    outcome = measured(subject, plans, kinds, design, fresh, audience)
    report = experiment_report(subject, outcome, design, title, command, further, sum(seconds))
    report["design"]["greedy"] = greedy.rows()
    return replace(greedy, report=report)
