"""hasten as its users run it: a recipe through ``hasten.training.run.train``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hasten.core.setup import Session
from hasten.core.timing import StepMetrics
from hasten.training.run import train as run_training
from step.clock import Clock
from step.given import Given
from step.prepare import recipe_of


def train(
    given: Given, clock: Clock, out: Path, plan: list[Any], profile: bool = False
) -> dict[str, Any]:
    """Train; hasten opens the examples that were tokenised beforehand, as in a second run."""
    shutil.copytree(given.folder / "data", out / "data")
    recipe = recipe_of(given.settings, given.folder, out, plan)
    watch = None
    if profile:
        from step.where import StepProfile

        watch = StepProfile(given)

    def on_start(session: Session) -> None:
        clock.started()
        building = sum(session.startup_seconds[key] for key in ("model", "assembly"))
        clock.marks["opened"] = clock.marks["started"] - building

    def on_step(metrics: StepMetrics) -> None:
        clock.step(metrics.tokens)
        clock.losses.append(metrics.loss)
        if watch is not None:
            watch.step(metrics)

    said: list[str] = []
    summary = run_training(recipe, tell=said.append, on_start=on_start, on_step=on_step)
    notes: dict[str, Any] = {
        "saved": summary["saved"],
        "plan": summary["plan"],
        "effective": summary["effective"],
        "skipped": [text for text in said if text.startswith("continuing without")],
        "own_eval_loss": summary["eval_loss"],
    }
    if watch is not None:
        notes["profile"] = watch.table()
    return notes
