"""Gradual optimisation: one technique more at a time, and only what pays is kept.

  1. the techniques stand in an order: that of their slots, or of the gain each has alone
  2. the plan so far and the plan with one technique more are measured against each other
  3. the technique is kept if its whole interval lies above the noise floor, it was seen to act, and
     the model isn't worse; else the next one is tried without it

Each of the n techniques gets one chance, so one of n that do nothing would be kept by luck n times
as often. Holm's correction orders all p-values first, which nobody has while climbing; so every
decision is taken at its first and strictest threshold, a doubt of 5 % / n (Bonferroni): that is
never laxer than Holm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.formatting import span
from hasten.measure.ablation import Arm
from hasten.measure.statistics import Interval, paired_ratio
from hasten.report.comparisons import ratio_to, ratios_of
from hasten.report.judgement import idle, quality

DOUBT = 0.05  # of all decisions of a climb together
FLOOR = 0.01  # a gain that nobody should act on

Measure = Callable[[Plan, Plan], tuple[Arm, Arm]]  # the plan so far, and with one technique more


@dataclass(frozen=True)
class Rung:
    """One technique's chance: what was measured, and what became of it."""

    technique: str
    # Against the plan so far, with the interval of the decision; None: not measured.
    ratio: dict[str, float | None] | None
    kept: bool
    why: str


@dataclass(frozen=True)
class Climb:
    """The plan that is left, how it came about, and its report against the baseline.

    ``report`` is None where nothing paid: then there is nothing to compare.
    """

    plan: Plan
    rungs: tuple[Rung, ...]
    report: dict[str, Any] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        sure = 100 * (1 - DOUBT / max(len(self.rungs), 1))
        head = f"| technique | times the plan so far [{sure:.3g} %] | kept | why |"
        rows = [head, "|---|---|---|---|"]
        for rung in self.rungs:
            found = "not measured" if rung.ratio is None else span(rung.ratio, "times")
            kept = "yes" if rung.kept else "no"
            rows.append(f"| {rung.technique} | {found} | {kept} | {rung.why} |")
        return "\n".join([*rows, "", f"kept: {self.plan if len(self.plan) else 'nothing'}"])

    def rows(self) -> list[dict[str, Any]]:
        """The rungs as plain dictionaries, for a report."""
        return [asdict(rung) for rung in self.rungs]


def climb(techniques: Sequence[Technique], measure: Measure) -> Climb:
    """Try every technique in this order on top of what was kept before it."""
    kept, rungs = Plan(), []
    for technique in techniques:
        wider = kept.with_(technique)
        rung = decide(technique, *measure(kept, wider), doubt=DOUBT / len(techniques))
        rungs.append(rung)
        kept = wider if rung.kept else kept
    return Climb(kept, tuple(rungs))


def decide(technique: Technique, before: Arm, after: Arm, doubt: float) -> Rung:
    """Whether a technique stays, from the arm without it and the arm with it."""

    def rung(kept: bool, why: str, ratio: Interval | None = None) -> Rung:
        return Rung(str(technique), ratio.summary() if ratio else None, kept, why)

    ratios = ratios_of(after, before)
    if after.failed is not None:
        return rung(False, f"failed: {after.failed}")
    if not ratios:
        return rung(False, f"the plan so far has no result: {before.failed or 'no rounds'}")
    ratio = paired_ratio([1.0] * len(ratios), ratios, confidence=1 - doubt)
    ratio = ratio if after.luck is None else after.luck.widened(ratio, confidence=1 - doubt)
    if after.unfinished is not None:
        return rung(False, f"what it did is not known: {after.unfinished}", ratio)
    if technique.name() in idle(after):
        return rung(False, "it did not act", ratio)
    if quality(after, before)["verdict"] == "worse":
        return rung(False, quality(after, before)["text"], ratio)
    if ratio.low > 1 + FLOOR:
        return rung(True, f"at least {100 * (ratio.low - 1):.1f} % faster", ratio)
    if ratio.high < 1 - FLOOR:
        return rung(False, "slower", ratio)
    return rung(False, f"not shown to gain more than {100 * FLOOR:g} %", ratio)


def by_gain(techniques: Iterable[Technique], arms: Sequence[Arm]) -> list[Technique]:
    """Techniques in the order of the gain each had alone; those without a result come last."""
    gains = {}
    for arm in arms[1:]:
        ratio = ratio_to(arm, arms[0])
        if len(arm.plan) == 1 and ratio is not None:
            gains[arm.plan.techniques[0]] = ratio.estimate
    return sorted(techniques, key=lambda t: gains.get(t, 0.0), reverse=True)
