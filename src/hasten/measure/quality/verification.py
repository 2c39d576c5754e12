"""Verification: checks every technique of a plan, as its fidelity requires.

All checks run on the user's own job:

    EXACT: The plan's losses with and without it, over some steps, compared bit by bit.
    ROUNDING: One step's gradient against float64, one example at a time. For an
    optimizer, the weights' update by the same gradients.
    LOSSY: Eval loss at equal tokens over paired seeds, not worse by more than the
    margin.

The plan as a whole requires invariances. Loss and gradient must not change with another
split into micro-batches, other rows, examples distributed to ranks, or other neighbours
in a row. If the plan fails, techniques are left out one at a time until the cause is
found.

Each check is a request to a separate process (`hasten.measure.quality`). This module
decides which checks are needed and what the answers mean. ``docs/explanation/why.md`` lists what
a check doesn't show.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.machine.cache import key_of
from hasten.machine.files import write_atomic
from hasten.measure.quality.gradient_rows import Gradients
from hasten.measure.quality.requirements import Row, exact_orders, exact_rows, lossy_rows
from hasten.measure.quality.runner import Perform, QualityRunner
from hasten.measure.recipe_experiment import ExperimentSubject, conditions
from hasten.recipe.build import batch_of
from hasten.recipe.schema import Recipe

MARGIN = 0.01  # of the eval loss
Tell = Callable[[str], None]
Rows = dict[str, list[Row]]


@dataclass(frozen=True)
class VerificationDesign:
    """How far a verification goes; fixed before its first run.

    Args:
        steps: of an EXACT technique's comparison.
        seeds: pairs of trainings for each LOSSY technique; 0: none.
        tokens: of each such training.
        margin: by how much the eval loss may be worse.
        budget_seconds: when the verification ends; what isn't proven by then is *not tested*, and
            there are as many seeds as fit.
    """

    steps: int = 3
    seeds: int = 0
    tokens: int = 0
    margin: float = MARGIN
    budget_seconds: float | None = None


def verification_report(
    plan: Plan,
    perform: Perform,
    design: VerificationDesign | None = None,
    tell: Tell = lambda text: None,
    ranks: int = 1,
    time_left: Callable[[], float] = lambda: math.inf,
) -> Rows:
    """The lists ``report.invariance`` and ``report.verification`` of a job on these ranks.

    ``time_left`` returns the remaining seconds of a budget.
    """
    design = design or VerificationDesign()
    tell("verification: gradients against float64, documents against each other, losses bit by bit")
    gradients = Gradients(plan, perform, ranks)
    answers = gradients.make(exact_orders(plan, design.steps))
    rows = gradients.verification() + exact_rows(plan, answers, perform, design.steps)
    lossy = [t for t in plan if t.fidelity is Fidelity.LOSSY]
    if lossy and design.seeds:
        trainings = (1 + len(lossy)) * design.seeds
        tell(f"verification: {trainings} trainings of {design.tokens:,} tokens")
    rows += lossy_rows(plan, perform, design.seeds, design.tokens, design.margin, time_left)
    order = {t.name(): position for position, t in enumerate(plan)}
    rows.sort(key=lambda row: order[row["technique"]])
    return {
        "invariance": [_finite(row) for row in gradients.invariance()],
        "verification": [_finite(row) for row in rows],
    }


def _finite(row: Row) -> Row:
    """JSON has no infinity: such a number becomes None."""
    infinite = {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return row | dict.fromkeys(infinite)


# The verification of a recipe, and what is kept of it.

STEPS = 50  # of a training with a seed, where the tokens aren't given


def verified(
    subject: ExperimentSubject, design: VerificationDesign, tell: Tell, fresh: bool = True
) -> Rows:
    """Invariance and verification rows of a recipe with prepared data.

    They are ``report.invariance`` and ``report.verification``.

    If ``fresh`` is True, all checks run again. Otherwise earlier results of the same plan,
    data, design, machine and sources count. If a process died or hung, nothing is stored.

    Raises:
        InputError: the recipe requests seeds without eval data.
    """
    recipe, context, plan = subject.recipe, subject.context, subject.plan
    lossy = any(t.fidelity is Fidelity.LOSSY for t in plan)
    if design.seeds and lossy and recipe.eval_data == 0:
        raise InputError("eval_data: seeds are compared by the eval loss; hold examples out")
    if design.seeds and not design.tokens:
        design = replace(design, tokens=tokens_of(recipe, context))
    folder = Path(recipe.output) / "data" / "verification"
    folder.mkdir(parents=True, exist_ok=True)
    decisive = {
        "recipe": recipe.model_dump(mode="json", exclude={"price", "plan", "output"}),
        "data": subject.data_key,
        "plan": plan.to_list(),
        "design": asdict(design),
        **conditions(context),
    }
    report_path = folder / f"{key_of(decisive)}.json"
    with contextlib.suppress(InputError):  # there is none, or none that can be read
        if not fresh:
            before: Rows = read_json_object(report_path, "report of a verification")
            tell(f"verification: proven before: {report_path}")
            return before
    resolved = folder / "recipe.yaml"
    resolved.write_text(recipe.to_yaml())

    budget = math.inf if design.budget_seconds is None else design.budget_seconds
    perform = QualityRunner(
        resolved, folder, subject.environment, ranks=recipe.nproc, budget_seconds=budget
    )
    try:
        report = verification_report(
            plan, perform, design, tell, recipe.nproc, lambda: perform.seconds_left
        )
        if not perform.broken:
            write_atomic(report_path, json.dumps(report, indent=1))
        return report
    finally:  # gradients and checkpoints are large; orders, answers and logs stay
        for path in folder.glob("*.pt"):
            path.unlink()
        for path in folder.glob("variant-*"):
            shutil.rmtree(path, ignore_errors=True)


def tokens_of(recipe: Recipe, context: JobContext) -> int:
    """Tokens of some steps of the recipe, or of all where it has fewer."""
    batch, examples = batch_of(recipe), context.examples
    of_step = batch.tokens or (batch.examples or 1) * examples.tokens / max(examples.count, 1)
    limits = (
        STEPS * of_step,
        (recipe.max_steps or 0) * of_step,
        (recipe.epochs or 0) * examples.tokens,
        recipe.max_tokens or 0,
    )
    return max(int(min((limit for limit in limits if limit), default=1)), 1)
