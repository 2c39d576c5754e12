"""The verification: for every technique of a plan the proof that its fidelity owes, on the user's
own job.

    EXACT     the plan's losses with and without it, over some steps, compared bit by bit
    ROUNDING  one step's gradient against float64, example by example; of an optimizer, the move of
              the weights by the same gradients
    LOSSY     eval loss at equal tokens over paired seeds, not worse by more than the margin

and for the plan as a whole its invariances: another cut into micro-batches, other rows, examples
dealt to ranks, changed neighbours in a row must leave loss and gradient what they are. Where the
plan fails, techniques are left out one at a time until it is known which of them is to blame.

Each proof is an order to a process apart (`hasten.measure.quality`); this module decides which are
needed and what the answers mean. Limits: ``docs/explanation/why.md``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hasten.core.context import JobContext
from hasten.core.plan import Plan
from hasten.core.technique import Fidelity
from hasten.errors import InputError
from hasten.machine.cache import key_of, source_digest
from hasten.machine.files import write_atomic
from hasten.measure.quality.requirements import (
    Gradients,
    VerificationRow,
    exact_orders,
    exact_rows,
    lossy_rows,
)
from hasten.measure.quality.runner import Perform, QualityRunner
from hasten.measure.recipe_experiment import environment
from hasten.recipe.build import batch_of
from hasten.recipe.schema import Recipe

MARGIN = 0.01  # of the eval loss
Tell = Callable[[str], None]


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
    left: Callable[[], float] = lambda: math.inf,
) -> dict[str, list[dict[str, Any]]]:
    """The lists for ``report.invariance`` and ``report.verification``, of a job on so many ranks.

    ``left`` tells the seconds that are left of a budget.
    """
    design = design or VerificationDesign()
    tell("verification: gradients against float64, documents against each other, losses bit by bit")
    gradients = Gradients(plan, perform, ranks)
    answers = gradients.make(exact_orders(plan, design.steps))
    rows: list[VerificationRow] = gradients.owed()
    rows += exact_rows(plan, answers, perform, design.steps)
    lossy = [t for t in plan if t.fidelity is Fidelity.LOSSY]
    if lossy and design.seeds:
        tell(
            f"verification: {(1 + len(lossy)) * design.seeds} trainings of {design.tokens:,} tokens"
        )
    rows += lossy_rows(plan, perform, design.seeds, design.tokens, design.margin, left)
    order = {t.name(): position for position, t in enumerate(plan)}
    rows.sort(key=lambda row: order[row.technique])
    return {
        "invariance": [row.to_dict() for row in gradients.invariance()],
        "verification": [row.to_dict() for row in rows],
    }


# The verification of a recipe, and what is kept of it.

STEPS = 50  # of a training with a seed, where the tokens aren't given
Rows = dict[str, list[dict[str, Any]]]


def verified(
    recipe: Recipe,
    context: JobContext,
    plan: Plan,
    data_key: str,
    design: VerificationDesign,
    tell: Callable[[str], None],
    fresh: bool = True,
) -> Rows:
    """``report.invariance`` and ``report.verification`` of a recipe whose data lies ready.

    ``fresh`` proves anew; else what the same plan, data, design, machine and sources have proven
    before counts. Where a process died or hung, nothing is kept for later.

    Raises:
        InputError: the recipe asks for seeds with nothing held out.
    """
    lossy = any(t.fidelity is Fidelity.LOSSY for t in plan)
    if design.seeds and lossy and recipe.eval_data == 0:
        raise InputError("eval_data: seeds are compared by the eval loss; hold examples out")
    if design.seeds and not design.tokens:
        design = replace(design, tokens=tokens_of(recipe, context))
    folder = Path(recipe.output) / "data" / "verification"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{_key(recipe, context, plan, data_key, design)}.json"
    before = None if fresh else _kept(kept)
    if before is not None:
        tell(f"verification: proven before: {kept}")
        return before
    resolved = folder / "recipe.yaml"
    resolved.write_text(recipe.to_yaml())

    environ = partial(environment, context=context, transport=recipe.transport)
    budget = math.inf if design.budget_seconds is None else design.budget_seconds
    perform = QualityRunner(resolved, folder, environ, ranks=recipe.nproc, budget_seconds=budget)
    try:
        found = verification_report(plan, perform, design, tell, recipe.nproc, lambda: perform.left)
        if not perform.broken:
            write_atomic(kept, json.dumps(found, indent=1))
        return found
    finally:  # gradients and checkpoints are large; orders, answers and logs stay
        for path in folder.glob("*.pt"):
            path.unlink()
        for path in folder.glob("variant-*"):
            shutil.rmtree(path, ignore_errors=True)


def _kept(path: Path) -> Rows | None:
    """What was proven before; None where nothing is, or nothing that can be read."""
    try:
        found: Rows = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _key(
    recipe: Recipe, context: JobContext, plan: Plan, data_key: str, design: VerificationDesign
) -> str:
    """Of everything that a proof depends on."""
    return key_of(
        {
            "recipe": recipe.model_dump(mode="json", exclude={"price", "plan", "output"}),
            "data": data_key,
            "plan": plan.to_list(),
            "design": asdict(design),
            "hardware": {**asdict(context.hardware), "device": context.device},
            "versions": dict(context.versions),
            "source": source_digest(),
        }
    )


def tokens_of(recipe: Recipe, context: JobContext) -> int:
    """Tokens of some steps of the recipe, or of all where it has fewer."""
    batch, examples = batch_of(recipe), context.examples
    of_step = batch.tokens or (batch.examples or 1) * examples.tokens / max(examples.count, 1)
    limits = [STEPS * of_step]
    limits += [recipe.max_steps * of_step] if recipe.max_steps else []
    limits += [recipe.epochs * examples.tokens] if recipe.epochs else []
    limits += [recipe.max_tokens] if recipe.max_tokens else []
    return max(int(min(limits)), 1)
