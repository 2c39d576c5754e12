"""LOSSY, proven: the plan against the plan without the technique, seed by seed, at equal tokens.

The held-out loss must not be worse by more than the margin, nor any measure of the job's own; of
those more is better, and worse means how many times as large the other's is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity, Technique
from hasten.measure.crew import Answer
from hasten.measure.non_inferiority import NonInferiority, non_inferiority
from hasten.measure.quality.guard_process import Order, Perform
from hasten.measure.quality.guard_rows import Owed, owed

ADVICE = 5  # seeds with which a first answer is likely
WORST_FIRST = ("worse", "inconclusive", "not worse")  # the least good measure decides


def lossy_rows(plan: Plan, perform: Perform, seeds: int, tokens: int, margin: float) -> list[Owed]:
    """One line for each LOSSY technique of the plan; without seeds they are not tested."""
    lossy = [t for t in plan if t.fidelity is Fidelity.LOSSY]
    if not seeds or not tokens:
        text = f"takes trainings with several seeds: --seeds {ADVICE}"
        return [owed(t, _test(margin), "not tested", text, allowed=margin) for t in lossy]
    if not lossy:
        return []
    plans = [plan, *(plan.without(t) for t in lossy)]
    orders = [
        Order("train", p, p, {"seed": seed, "tokens": tokens})
        for p in plans
        for seed in range(1, seeds + 1)
    ]
    answers = perform(orders)
    runs = [answers[i * seeds : (i + 1) * seeds] for i in range(len(plans))]
    return [_row(t, runs[0], runs[i], margin) for i, t in enumerate(lossy, start=1)]


def _row(technique: Technique, ours: list[Answer], theirs: list[Answer], margin: float) -> Owed:
    pairs = list(zip(theirs, ours, strict=True))
    usable = [(a, b) for a, b in pairs if _loss(a) is not None and _loss(b) is not None]
    broken = next((b for a, b in pairs if _loss(a) is not None and _diverged(b)), None)
    if broken is not None:
        text = f"training with it ended without a finite loss: {broken.get('failed', 'NaN')}"
        return owed(technique, _test(margin), "worse", text, allowed=margin, seeds=len(pairs))
    if not usable:
        why = next((a["failed"] for pair in pairs for a in pair if "failed" in a), "")
        text = why or "nothing is held out: give held_out"
        return owed(technique, _test(margin), "not tested", text, allowed=margin)
    measures = [_Measure("held-out loss", *_values(usable, _loss)), *_own_measures(usable)]
    found = [m.judged(margin) for m in measures]
    verdict = min((f.verdict for f in found), key=WORST_FIRST.index)
    upper = max(f.upper for f in found) - 1
    tokens = f"{usable[0][0]['tokens']:,} and {usable[0][1]['tokens']:,} tokens"
    said = [m.words(f) for m, f in zip(measures, found, strict=True)]
    text = f"after {tokens}, {len(usable)} seeds: {'; '.join(said)}"
    numbers = {"found": upper if math.isfinite(upper) else None, "allowed": margin}
    test = _test(margin, [m.name for m in measures])
    return owed(technique, test, verdict, text, seeds=len(usable), **numbers)


@dataclass(frozen=True)
class _Measure:
    """One measure of quality, seed by seed; of ``rises`` more is better, of the others less."""

    name: str
    without: list[float]
    with_: list[float]
    rises: bool = False

    def judged(self, margin: float) -> NonInferiority:
        if not self.rises:
            return non_inferiority(self.without, self.with_, margin)
        without, with_ = ([1 / value for value in values] for values in (self.without, self.with_))
        return non_inferiority(without, with_, margin)

    def words(self, found: NonInferiority) -> str:
        """Means with and without, by how much it is worse, and how sure that is."""
        mean = sum(self.without) / len(self.without), sum(self.with_) / len(self.with_)
        change = f"{100 * (found.ratio - 1):+.2f} %{' worse' if self.rises else ''}"
        said = f"{self.name} {mean[0]:.4f} without and {mean[1]:.4f} with it, {change}"
        if math.isfinite(found.upper):
            said += f", at most {100 * (found.upper - 1):+.2f} % (95 %)"
        if found.verdict != "inconclusive":
            return said
        if found.more is None:
            return f"{said}; no number of seeds would tell it from the margin"
        return f"{said}; about {found.more} more seeds would tell"


def _own_measures(pairs: list[tuple[Answer, Answer]]) -> list[_Measure]:
    """The job's own measures, of which more is better, where every training has one above 0."""
    found = []
    for name in pairs[0][0].get("metrics") or {}:
        without, with_ = _values(pairs, partial(_measured, name=name))
        if all(0 < value < math.inf for value in (*without, *with_)):
            found.append(_Measure(name, without, with_, rises=True))
    return found


def _values(
    pairs: list[tuple[Answer, Answer]], of: Callable[[Answer], float | None]
) -> tuple[list[float], list[float]]:
    without, with_ = ([float(of(pair[i]) or 0.0) for pair in pairs] for i in (0, 1))
    return without, with_


def _measured(answer: Answer, name: str) -> float | None:
    value: float | None = (answer.get("metrics") or {}).get(name)
    return value


def _loss(answer: Answer) -> float | None:
    value = answer.get("held_out_loss")
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _diverged(answer: Answer) -> bool:
    """It trained to no finite loss; a process that died for another reason says nothing of it."""
    if "failed" in answer:
        return str(answer["failed"]).startswith("NotFiniteError")
    value = answer.get("held_out_loss")
    return value is not None and not math.isfinite(value)


def _test(margin: float, names: Sequence[str] = ("held-out loss",)) -> str:
    measures = " and ".join(names)
    return f"{measures} at equal tokens, paired seeds, margin {100 * margin:g} % fixed before"
