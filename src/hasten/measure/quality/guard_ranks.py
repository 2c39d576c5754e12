"""What ranks add to a guard's rows: records dealt to them, and gradients that travel between them.

A wire of ROUNDING may send numbers in 16 bits, each rounded on its way there and back. So it is not
among the techniques that are tested together, whose bound is that of float32, but beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hasten.core.technique import Technique
from hasten.measure.crew import Answer
from hasten.measure.quality.guard_rows import (
    LOSS_FLOAT32,
    TENSOR,
    WIRE,
    Bound,
    Invariance,
    Owed,
    owed,
    short,
)

ONE_PROCESS = "needs several ranks, and one process ran; nproc: 2 in the recipe runs two"
Found = Mapping[str, Answer]  # of the orders `planned` and `wire` on all ranks, `single` on one


def split_row(ranks: int, found: Found, bound: Bound) -> Invariance:
    """Whether the step's records may be dealt to ranks: both ways agree with float64."""
    if ranks == 1:
        return Invariance("split over ranks", "not tested", None, None, ONE_PROCESS)
    what, here, alone = f"split over {ranks} ranks", found["planned"], found["single"]
    failed = _failed(ranks, here, alone)
    if failed:
        return Invariance(what, "not tested", None, None, failed)
    good, alone_good = (bound.excess(answer) <= 1 for answer in (here, alone))
    if good and alone_good:
        text = f"on {ranks} ranks the gradient is {short(here)}, in one process {short(alone)}"
        return Invariance(what, "equal", here["error"], bound.whole, text)
    if good:
        text = f"in one process {bound.words(alone)}; not so on {ranks} ranks"
        return Invariance(what, "differs", alone["error"], bound.whole, text)
    text = f"{bound.words(here)}; {'not so' if alone_good else 'nor is it equal'} in one process"
    return Invariance(what, "differs", here["error"], bound.whole, text)


def wire_row(technique: Technique, ranks: int, found: Found, bound: Bound) -> Owed:
    """Whether gradients arrive as they left, but for the rounding of what travels."""
    test = f"gradient of one step on {ranks} ranks against float64, all that isn't lossy beside it"
    if ranks == 1:
        return owed(technique, "gradient of one step against float64", "not tested", ONE_PROCESS)
    answer, without = found["wire"], found["planned"]
    failed = _failed(ranks, answer, without)
    if failed:
        return owed(technique, test, "not tested", failed)
    if bound.excess(without) > 1:
        text = f"without it, too: {bound.words(without)}"
        return owed(technique, test, "inconclusive", text)
    allowed = Bound(
        max(WIRE, bound.whole), max(TENSOR * WIRE, bound.tensor), max(LOSS_FLOAT32, bound.loss)
    )
    verdict = "equal" if allowed.excess(answer) <= 1 else "differs"
    text = f"{allowed.words(answer)}; without it the gradient is {short(without)}"
    return owed(technique, test, verdict, text, found=answer["error"], allowed=allowed.whole)


def _failed(ranks: int, here: Answer, other: Answer) -> str | None:
    """Why there is nothing to judge."""
    for answer in (here, other):
        if "failed" in answer:
            return str(answer["failed"])
    if here["ranks"] != ranks:
        return f"{here['ranks']} of {ranks} ranks took part"
    return None
