"""A process that is given orders, alone or among ranks; and a folder that it alone writes to.

Whatever goes wrong is said before the group of ranks is left, since leaving may wait for others
that wait for this one.
"""

from __future__ import annotations

import datetime
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hasten.launch.ranks import naming_ranks, process_group
from hasten.machine import environment
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


# A folder that no other process writes into, for as long as one trains.

RENDEZVOUS = "HASTEN_RENDEZVOUS"  # ranks of one start meet in a place of their own


@contextmanager
def own_folder(within: Path) -> Iterator[Path]:
    """A folder's name in ``within``, the same on all ranks of a start; it is gone afterwards.

    In an experiment processes with one plan train side by side, and what the plan writes
    (checkpoints) would be the other's as well.
    """
    here = environment.world()
    meeting = environment.variable(RENDEZVOUS) if here.size > 1 else None
    mark = f"{zlib.crc32(meeting.encode()):08x}" if meeting else str(os.getpid())
    place = within / f"arm-{mark}"
    try:
        yield place
    finally:
        if here.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
