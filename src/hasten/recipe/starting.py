"""Before the first step: what ranks tell each other, where they go on, how long it took."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hasten.core.evaluate import Evaluation
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


def evaluations_before(session: Session, file: Path) -> list[Evaluation]:
    """What attempts before this one measured up to the step that it goes on from.

    The first rank reads the file, and all get the same; the user's own metrics stay behind.
    """
    rows = _rows(file, session.progress.step) if session.setup.facts.world.is_main else []
    everywhere = session.setup.layout.everywhere
    count = int(everywhere(torch.tensor([len(rows)], dtype=torch.float64)).item())
    if not count:
        return []
    mine = torch.tensor(rows or [[0.0] * 3] * count, dtype=torch.float64)
    found = everywhere(mine.flatten()).reshape(count, 3).tolist()
    return [Evaluation(int(step), int(tokens), loss) for step, tokens, loss in found]


def _rows(file: Path, last: int) -> list[list[float]]:
    """Step, tokens and held-out loss of each whole line with a loss."""
    rows: list[list[float]] = []
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                said = json.loads(line)
                row = [float(said[key]) for key in ("step", "tokens", "held_out_loss")]
                rows += [row] if row[0] <= last else []
    return rows
