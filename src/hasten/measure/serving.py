"""What a process does that is given orders: alone, or among ranks that are given the same ones.

Whatever goes wrong is said before the group of ranks is left, since leaving may wait for others
that wait for this one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from hasten.launch.ranks import naming_ranks, process_group
from hasten.machine.environment import World


def served(
    world: World,
    device: Callable[[], str],
    meeting: tuple[datetime.timedelta, str],
    serve: Callable[[], None],
    say: Callable[[dict[str, Any]], None],
) -> int:
    """Meet the other ranks, if there are any, and serve; the exit code.

    Args:
        world: this process's place.
        device: that trains; asked only where ranks meet.
        meeting: how long a rank waits for the others, and the backend.
        serve: builds what it needs by itself, so that it is gone when the group goes.
        say: is told ``{"failed": why}`` if anything goes wrong.
    """
    try:
        if world.size == 1:
            serve()
            return 0
        with process_group(world, device(), *meeting):
            return _among_others(world, serve, say)
    except Exception as error:  # whoever gave the orders reports it
        say(failure(error))
        return 1


def _among_others(
    world: World, serve: Callable[[], None], say: Callable[[dict[str, Any]], None]
) -> int:
    try:
        with naming_ranks(world):
            serve()
    except Exception as error:
        say(failure(error))
        return 1
    return 0


def failure(error: Exception) -> dict[str, Any]:
    """What is said of an error."""
    return {"failed": f"{type(error).__name__}: {error}"}
