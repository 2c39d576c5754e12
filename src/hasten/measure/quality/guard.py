"""The guard: for every technique of a plan the proof that its fidelity owes, on the user's own job.

    EXACT     the plan's losses with and without it, over some steps, compared bit by bit
    ROUNDING  one step's gradient against float64, record by record; of an optimizer, the move of
              the weights by the same gradients
    LOSSY     held-out loss at equal tokens over paired seeds, not worse by more than the margin

and for the plan as a whole its invariances: another cut into micro-batches, other rows, records
dealt to ranks, changed neighbours in a row must leave loss and gradient what they are. Where the
plan fails, techniques are left out one at a time until it is known which of them is to blame.

Each proof is an order to a process apart (`hasten.measure.quality`); this module decides which are
needed and what the answers mean. What a proof doesn't show stands in ``docs/guard.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.measure.quality.requirements import (
    Gradients,
    Owed,
    exact_orders,
    exact_rows,
    lossy_rows,
)
from hasten.measure.quality.runner import Perform

MARGIN = 0.01  # of the held-out loss
Tell = Callable[[str], None]


@dataclass(frozen=True)
class GuardDesign:
    """How far a guard goes; fixed before its first run.

    Args:
        steps: of an EXACT technique's comparison.
        seeds: pairs of trainings for each LOSSY technique; 0: none.
        tokens: of each such training.
        margin: by how much the held-out loss may be worse.
        budget_seconds: when the guard ends; what isn't proven by then is *not tested*, and there
            are as many seeds as fit.
    """

    steps: int = 3
    seeds: int = 0
    tokens: int = 0
    margin: float = MARGIN
    budget_seconds: float | None = None


def guard_report(
    plan: Plan,
    perform: Perform,
    design: GuardDesign | None = None,
    tell: Tell = lambda text: None,
    ranks: int = 1,
    left: Callable[[], float] = lambda: math.inf,
) -> dict[str, list[dict[str, Any]]]:
    """The lists for ``report.invariance`` and ``report.guard``, of a job on so many ranks.

    ``left`` tells the seconds that are left of a budget.
    """
    design = design or GuardDesign()
    tell("guard: gradients against float64, documents against each other, losses bit by bit")
    gradients = Gradients(plan, perform, ranks)
    answers = gradients.make(exact_orders(plan, design.steps))
    rows: list[Owed] = gradients.owed()
    rows += exact_rows(plan, answers, perform, design.steps)
    lossy = [t for t in plan if t.fidelity is Fidelity.LOSSY]
    if lossy and design.seeds:
        tell(f"guard: {(1 + len(lossy)) * design.seeds} trainings of {design.tokens:,} tokens")
    rows += lossy_rows(plan, perform, design.seeds, design.tokens, design.margin, left)
    order = {t.name(): position for position, t in enumerate(plan)}
    rows.sort(key=lambda row: order[row.technique])
    return {
        "invariance": [row.to_dict() for row in gradients.invariance()],
        "guard": [row.to_dict() for row in rows],
    }
