"""EXACT, proven: the plan's losses with the technique and without it, compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity, Technique
from hasten.measure.crew import Answer
from hasten.measure.quality.guard_process import Order, Perform
from hasten.measure.quality.guard_rows import Owed, owed


def exact_orders(plan: Plan, steps: int) -> list[Order]:
    """The plan, and the plan without each of its EXACT techniques; nothing if it has none."""
    exact = _exact(plan)
    return [_order(p, steps) for p in (plan, *(plan.without(t) for t in exact))] if exact else []


def exact_rows(plan: Plan, answers: Sequence[Answer], perform: Perform, steps: int) -> list[Owed]:
    """One line for each EXACT technique of the plan; ``answers`` are those to `exact_orders`.

    A plan whose own losses differ from one run to the next can't show that a technique leaves
    their bits alone; that is found out only where a difference makes it necessary.
    """
    exact = _exact(plan)
    if not exact:
        return []
    whole, *rest = answers
    differ = [_differs(whole, answer) for answer in rest]
    repeats = True
    if any(differ):
        again = perform([_order(plan, steps)])[0]
        repeats = not _differs(whole, again) and "failed" not in again
    return [_row(t, whole, answer, steps, repeats) for t, answer in zip(exact, rest, strict=True)]


def _exact(plan: Plan) -> list[Technique]:
    return [t for t in plan if t.fidelity is Fidelity.EXACT]


def _order(plan: Plan, steps: int) -> Order:
    return Order("losses", plan, plan, {"steps": steps})


def _differs(one: Answer, other: Answer) -> bool:
    parts = ("losses", "weights")
    return "failed" not in one and "failed" not in other and any(one[k] != other[k] for k in parts)


def _row(technique: Technique, whole: Answer, rest: Answer, steps: int, repeats: bool) -> Owed:
    test = f"losses and weights of {steps} steps with and without it, bit by bit"
    failed = whole.get("failed") or rest.get("failed")
    if failed:
        return owed(technique, test, "not tested", failed)
    ours, theirs = _numbers(whole), _numbers(rest)
    if len(ours) != len(theirs) or not ours:
        return owed(technique, test, "not tested", "the job has fewer steps than were asked for")
    if not _differs(whole, rest):
        text = f"{len(ours)} losses and the weights after them are the same to the last bit"
        return owed(technique, test, "equal", text, found=0.0, allowed=0.0)
    pairs = list(zip(ours, theirs, strict=True))
    first = next((i for i, (a, b) in enumerate(pairs, start=1) if a != b), None)
    off = max(abs(a - b) / max(abs(b), 1e-300) for a, b in pairs if a != b) if first else 0.0
    if not repeats:
        text = "the plan itself doesn't repeat its bits, so nothing follows"
        return owed(technique, test, "inconclusive", text, found=off, allowed=0.0)
    text = "the losses are the same, the weights after them aren't"
    if first:
        text = f"the loss of step {first} is the first to differ; by {off:.2g} at most"
    return owed(technique, test, "differs", text, found=off, allowed=0.0)


def _numbers(answer: Answer) -> Sequence[float]:
    found = [float.fromhex(text) for text in answer["losses"]]
    return [math.inf if math.isnan(v) else v for v in found]  # NaN equals NaN here
