"""The checkpoints of a folder: their names, and what moves one out of the way."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hasten.parts.checkpoint.manifest import STEP

REASON = "why-damaged.txt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; anything with another name is not one."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if STEP.fullmatch(p.name))
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def quarantine(path: Path, reason: str) -> Path | None:
    """Rename a damaged checkpoint out of the way, with the reason in it; None if that can't be.

    In its place it would be tried again at every start, and block the next save of its step.
    """
    place = path.with_name(f".damaged-{path.name}-{time.time_ns()}")
    try:
        # Another rank may have been faster, and a folder may be read-only: neither is a reason
        # to not go on to the one before.
        path.rename(place)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if place.is_dir() and not place.is_symlink():
            (place / REASON).write_text(reason + "\n", encoding="utf-8")
    return place


def set_aside(folder: Path, step: int) -> list[Path]:
    """Rename checkpoints after ``step`` to ``.aside-*``: a run goes back and takes another way."""
    moved = []
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            place = path.with_name(f".aside-{path.name}-{time.time_ns()}")
            path.rename(place)
            moved.append(place)
    return moved


def bytes_in(folder: Path) -> int:
    """What the checkpoints in a folder take, as far as their files can be seen."""
    total = 0
    for path in checkpoints(folder):
        with contextlib.suppress(OSError):
            total += sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    return total
