"""The planted truths as a real experiment: nine processes that take turns, and their verdicts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.measure.ablation import Design, Kind
from hasten.measure.experiment import experiment_context, measure_variants
from hasten.measure.workers import WorkerPool
from measure.planted import BASELINE, TRUTHS, Proofs, rows_of
from verdicts.job import WARM_UP, resolved_recipe
from verdicts.planted_trial import worker
from verdicts.spread import STEADY


def real(
    rounds: int, steps: int, builds: int, seed: int, proofs: Proofs
) -> dict[str, dict[str, Any]]:
    """One experiment: each variant's row of the report."""
    plans = {"baseline": Plan(BASELINE), "again": Plan(BASELINE)}
    plans |= {truth.name: truth.plan for truth in TRUTHS}
    kinds: dict[str, Kind] = {"baseline": "baseline", "again": "again"}
    design = Design(rounds, steps, WARM_UP, evaluations=1, seed=seed, builds=builds)
    with tempfile.TemporaryDirectory() as place:
        recipe = resolved_recipe(Path(place), design.steps_in_all)
        with WorkerPool(Path(place)) as pool:
            at = experiment_context(pool, lambda name: worker(recipe, plans[name], STEADY))
            variants = measure_variants(at, plans, design, kinds=kinds).variants
    for variant in variants:
        if variant.failed is not None:
            raise RuntimeError(f"{variant.name}: {variant.failed}")
    return {row["name"]: row for row in rows_of(variants, proofs[0])}
