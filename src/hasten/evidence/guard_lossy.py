"""LOSSY, proven: held-out loss of the plan and of the plan without the technique, seed by seed."""

from __future__ import annotations

import math

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity, Technique
from hasten.evidence.guard_process import Answer, Order, Perform
from hasten.evidence.guard_rows import Owed, owed
from hasten.evidence.non_inferiority import NonInferiority, non_inferiority

ADVICE = 5  # seeds with which a first answer is likely


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
    without, with_ = ([float(pair[i]["held_out_loss"]) for pair in usable] for i in (0, 1))
    found = non_inferiority(without, with_, margin)
    upper = found.upper - 1 if math.isfinite(found.upper) else None
    text = _words(found, without, with_, usable[0])
    numbers = {"found": upper, "allowed": margin, "seeds": len(usable)}
    return owed(technique, _test(margin), found.verdict, text, **numbers)


def _words(
    found: NonInferiority, without: list[float], with_: list[float], pair: tuple[Answer, Answer]
) -> str:
    mean = sum(without) / len(without), sum(with_) / len(with_)
    tokens = f"{pair[0]['tokens']:,} and {pair[1]['tokens']:,} tokens"
    said = (
        f"held-out loss {mean[0]:.4f} without and {mean[1]:.4f} with it after {tokens}, "
        f"{found.pairs} seeds: {100 * (found.ratio - 1):+.2f} %"
    )
    if math.isfinite(found.upper):
        said += f", at most {100 * (found.upper - 1):+.2f} % (95 %)"
    if found.verdict != "inconclusive":
        return said
    if found.more is None:
        return f"{said}; no number of seeds would tell it from the margin"
    return f"{said}; about {found.more} more seeds would tell"


def _loss(answer: Answer) -> float | None:
    value = answer.get("held_out_loss")
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _diverged(answer: Answer) -> bool:
    """It trained to no finite loss; a process that died for another reason says nothing of it."""
    if "failed" in answer:
        return str(answer["failed"]).startswith("NotFiniteError")
    value = answer.get("held_out_loss")
    return value is not None and not math.isfinite(value)


def _test(margin: float) -> str:
    return f"held-out loss at equal tokens, paired seeds, margin {100 * margin:g} % fixed before"
