"""A recipe's keys for what can go wrong, as the objects that watch for it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from hasten.core.health import NEEDS_CHECKPOINTS, Guards, SpikeWatch, check_comparable, check_policy
from hasten.core.loop import Notice, ask_to_leave
from hasten.core.plan import Plan
from hasten.core.session import Session
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.launch.supervisor import Limits, Supervision
from hasten.recipe.schema import Recipe

SPARES = "hasten.cli.standby_rank"


def set_guards(session: Session, recipe: Recipe, output: Path) -> None:
    """What the session's steps are checked for, before it resumes.

    Raises:
        InputError: a guard can't do its work in this plan.
    """
    session.setup.guards = Guards(
        recipe.max_skipped, output / "quarantined.jsonl", recipe.check_replicas
    )
    check_comparable(session, recipe.check_replicas)
    if recipe.loss_spike is not None:
        session.setup.spikes = SpikeWatch(recipe.loss_spike, output / "spikes.jsonl")
        check_policy(session)


def check_faults(recipe: Recipe, plan: Plan) -> None:
    """Raise InputError where a policy can't do what it says, before anything is read."""
    if recipe.loss_spike is not None and not saves(plan):
        raise InputError(NEEDS_CHECKPOINTS)


def watch_notices(session: Session, recipe: Recipe) -> AbstractContextManager[Any]:
    """Leave when the recipe's file appears or its command says so; on the first rank."""
    if not session.setup.facts.world.is_main or not (recipe.leave_file or recipe.leave_command):
        return contextlib.nullcontext()
    file = Path(recipe.leave_file) if recipe.leave_file else None
    leave = partial(ask_to_leave, session, haste=True)
    return Notice(leave, file, recipe.leave_command or ())


def supervision_of(recipe: Recipe) -> Supervision:
    """What the supervisor of the recipe's ranks may do."""
    return Supervision(
        recipe.max_restarts,
        Limits(recipe.hang_seconds, recipe.start_seconds),
        recipe.min_nproc,
        SPARES if recipe.warm_restarts else None,
    )


def saves(plan: Plan) -> bool:
    """Whether restarts have anything to go on from."""
    return Slot.CHECKPOINT in plan
