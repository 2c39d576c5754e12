"""Which checkpoints stay: the newest few that verify; damaged ones are set apart, not deleted.

What hasten did not make is never deleted: a folder goes only with a sealed manifest of ours in it,
or with a name that only a save of ours gives to what isn't done.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hasten.parts.checkpoint.disk import Disk
from hasten.parts.checkpoint.folder import checkpoints, quarantine
from hasten.parts.checkpoint.manifest import (
    MANIFEST,
    PASSING,
    DamagedCheckpointError,
    NewerFormatError,
    read_manifest,
)
from hasten.parts.checkpoint.verify import verify

_ASIDE = re.compile(r"\.aside-step-\d{8,12}-(\d+)")
_UNDONE = re.compile(r"\.(writing|deleting)-step-\d{8,12}-\d+")
Known = MutableMapping[str, tuple[Any, ...]]  # name -> how its files stood when they verified


def prune(
    folder: Path,
    keep: int,
    known: Known | None = None,
    noted: Callable[[Path, str], None] = lambda path, reason: None,
) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints that verify; those that are left.

    What a killed process left half done goes too, and of checkpoints that were set aside all but
    as many. A checkpoint that others differ from stays as long as they do; and one that is whole
    by itself before it, unless ``keep`` is 1, so that damage to one file never costs all of them.

    Args:
        known: what verified before isn't read again while size and time of its files stay; kept
            up to date here.
        noted: told each damaged one with the reason.

    Raises:
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint is kept")
    known = {} if known is None else known
    good: list[Path] = []
    needed: set[str] = set()
    wholes = 0
    for path in reversed(checkpoints(folder)):
        # Of a later version, or not to be read just now: neither counted nor gone.
        with contextlib.suppress(NewerFormatError, OSError):
            spare = len(good) >= keep and path.name not in needed
            if spare and (wholes >= min(keep, 2) or _base_of(path)):
                _delete(path)
            elif _verifies(path, known, noted):
                good.append(path)
                base = _base_of(path)
                needed |= base
                wholes += not base
            else:
                for lost in [other for other in good if path.name in _base_of(other)]:
                    good.remove(lost)
                    known.pop(lost.name, None)
    for name in [name for name in known if not (folder / name).exists()]:
        del known[name]
    sweep(folder)
    for path in _left_aside(folder)[keep:]:
        Disk().remove(path)
    return good[::-1]


def sweep(folder: Path) -> None:
    """Delete what a killed process left half done, for whoever alone may write into the folder."""
    for path in list(folder.iterdir()):
        if _UNDONE.fullmatch(path.name):
            Disk().remove(path)


def _left_aside(folder: Path) -> list[Path]:
    """Checkpoints of ways that weren't taken, whole by their manifest; the newest first."""
    found = []
    for path in folder.iterdir():
        name = _ASIDE.fullmatch(path.name)
        if name is None or path.is_symlink():
            continue
        with contextlib.suppress(DamagedCheckpointError, NewerFormatError, OSError):
            read_manifest(path)
            found.append((int(name[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def _verifies(path: Path, known: Known, noted: Callable[[Path, str], None]) -> bool:
    try:
        stands = _stands(path)
        if known.get(path.name) != stands:
            known.pop(path.name, None)
            verify(path)
            known[path.name] = stands
    except (DamagedCheckpointError, OSError) as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        quarantine(path, str(error))
        noted(path, str(error))
        return False
    return True


def _stands(path: Path) -> tuple[Any, ...]:
    """Size and time of every file: what accidents and editors change, bad memory cells don't."""
    found = []
    for entry in sorted(os.scandir(path), key=lambda e: e.name):
        facts = entry.stat(follow_symlinks=False)
        found.append((entry.name, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _base_of(path: Path) -> set[str]:
    with contextlib.suppress(DamagedCheckpointError):
        base: Mapping[str, Any] | None = read_manifest(path).get("base")
        return {base["name"]} if base else set()
    return set()


def _delete(path: Path) -> None:
    """Delete a checkpoint of ours, whole or not; what has no manifest of ours isn't touched."""
    try:
        read_manifest(path)
    except DamagedCheckpointError as error:
        if (path / MANIFEST).is_file() and not path.is_symlink():
            quarantine(path, str(error))
        return
    gone = path.with_name(f".deleting-{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        path.rename(gone)
        Disk().remove(gone)
