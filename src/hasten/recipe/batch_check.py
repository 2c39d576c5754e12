"""The global batch against the ranks: one that is smaller leaves ranks without an example.

Ranks that hold pieces of one copy of the model share its examples, so the batch is compared with
the number of copies.
"""

from __future__ import annotations

from hasten.core.plan import Plan
from hasten.errors import InputError
from hasten.recipe.build import batch_of, requested_plan
from hasten.recipe.schema import Recipe
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.pipeline import Pipeline
from hasten.techniques.layout.tensor import TensorParallel


def check_batch_of_ranks(recipe: Recipe, ranks: int, tokens_of_example: float = 2.0) -> None:
    """Refuse a step that has fewer examples than the ranks that take their own.

    Args:
        ranks: processes of the run.
        tokens_of_example: mean length, for a batch that is given in tokens; 2 is the least that
            trains anything.

    Raises:
        InputError: ranks would be without an example in every step.
    """
    copies = model_copies(requested_plan(recipe), ranks)
    batch = batch_of(recipe)
    key, size, unit = "global_batch_size", batch.records or 0, "examples"
    examples = float(size)
    if batch.tokens:
        key, size, unit = "global_batch_tokens", batch.tokens, "tokens"
        examples = size / tokens_of_example
    if examples >= copies:
        return
    of = f"{ranks} ranks" if copies == ranks else f"{ranks} ranks with {copies} copies of the model"
    least = copies if key == "global_batch_size" else round(copies * tokens_of_example)
    raise InputError(
        f"{key}: {size} {unit} a step are too few for {of}, some of which would never have an "
        f"example: give at least {key}: {least}, or start fewer ranks"
    )


def model_copies(plan: Plan, ranks: int) -> int:
    """How many copies of the model the ranks hold together; each takes examples of its own."""
    for technique in plan:
        if isinstance(technique, TensorParallel):
            return max(ranks // (technique.size or ranks), 1)
        if isinstance(technique, Pipeline):
            return max(ranks // technique.ranks(ranks), 1)
        if isinstance(technique, Hybrid):
            return max(ranks // (technique.tp * technique.pp), 1)
    return ranks
