"""A folder that no other process writes into, for as long as one trains."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hasten.machine import environment

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
