"""Before the first step: what ranks tell each other, where they go on, how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.core.facts import Facts
from hasten.core.session import Session
from hasten.core.step import StepMetrics
from hasten.recipe.schema import Recipe

OWN = ("nproc", "output", "min_nproc")  # a rank may have its own


def promised(recipe: Recipe, known: Facts) -> dict[str, dict[str, Any]]:
    """What must be the same on every rank, for :func:`hasten.cluster.joining.agree`."""
    keys = recipe.model_dump(mode="json")
    return {
        "recipe": {key: value for key, value in keys.items() if key not in OWN},
        "version": dict(known.versions),
        "set of records": asdict(known.records),
        "model": asdict(known.model),
    }


def noting_first_step(
    began: float,
    on_start: Callable[[Session], None],
    on_step: Callable[[StepMetrics], None],
) -> tuple[Callable[[Session], None], Callable[[StepMetrics], None]]:
    """The two, and beside them the seconds from ``began`` to the end of the first step."""
    waiting: list[Session] = []

    def start(session: Session) -> None:
        waiting.append(session)
        on_start(session)

    def step(metrics: StepMetrics) -> None:
        if waiting:
            seconds = waiting.pop().startup_seconds
            seconds["until_first_step"] = time.perf_counter() - began + seconds["imports"]
        on_step(metrics)

    return start, step


def resume_from(session: Session, what: str, tell: Callable[[str], None]) -> None:
    """Go on from a checkpoint: the newest, or the one of a path."""
    found = session.setup.checkpoint.resume(session, None if what == "auto" else Path(what))
    if found is None:
        tell("no checkpoint to resume from, starting at the beginning")
    else:
        tell(f"resuming from {found}, step {session.progress.step}")
