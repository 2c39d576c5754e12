"""``auto: true`` of a recipe: safe settings tried while the run trains, and a line for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hasten.core.health import append_line
from hasten.core.session import Session
from hasten.recipe.schema import Recipe
from hasten.training.live import Live, sentence
from hasten.training.run_folder import ADJUSTMENTS

Tell = Callable[[str], None]


def adjust(session: Session, recipe: Recipe, output: Path, tell: Tell) -> None:
    """Have the session's settings tried, where the recipe says so; every rank, before it resumes.

    Raises:
        InputError: settings of this plan can't change while it trains.
    """
    if not recipe.auto:
        return
    main = session.setup.facts.world.is_main

    def note(line: dict[str, Any]) -> None:
        if main:
            append_line(output / ADJUSTMENTS, line)
            tell(sentence(line))

    session.setup.adjusting = Live(session, recipe.seed, note)


def adjusted(session: Session) -> dict[str, Any]:
    """Settings that were changed while training, by ``technique.setting``."""
    found = session.setup.adjusting
    return found.changed if isinstance(found, Live) else {}
