"""A job for workers that also knows the planted techniques, and the workers of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.core.plan import Plan
from hasten.measure.worker import Serve, recipe_job
from hasten.measure.workers import WorkerSpec
from measure.planted_techniques import PLANTED

HERE = Path(__file__).parents[1]
PATHS = os.pathsep.join([str(HERE), str(HERE.parent / "tests"), str(HERE.parent / "tests/common")])


def job(arguments: Mapping[str, Any], serve: Serve) -> int:
    return recipe_job(arguments, serve, more=PLANTED)


def worker(recipe: Path, plan: Plan, environ: Mapping[str, str]) -> WorkerSpec:
    """A worker of a plan that may have planted techniques."""
    given = {"recipe": str(recipe), "plan": plan.to_list()}
    return WorkerSpec("verdicts.planted_trial:job", given, {**environ, "PYTHONPATH": PATHS})
