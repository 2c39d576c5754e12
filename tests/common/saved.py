"""Checkpoints of named tensors in a folder, written and read as a run does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.checkpoint.format import Disk, name_of
from hasten.parts.checkpoint.saver import Saver


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    disk: Disk | None = None,
) -> Path:
    """Returns the path of a new checkpoint; all earlier ones stay."""
    saver = Saver(folder, 1000, False, False, disk or Disk())
    saver.open()
    try:
        saver.save(step, tensors, meta)
    finally:
        saver.close()
    return folder / name_of(step)


def load_latest(
    folder: Path, alarms: list[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], Path] | None:
    """Returns the newest checkpoint that verifies, or None; damaged ones are set aside.

    Args:
        alarms: receives what is said of these.
    """
    keeper = SmartCheckpointer(folder=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = keeper.load_state()
    if alarms is not None:
        alarms += keeper.alarms
    return None if found is None else (dict(found[0]), found[1], found[2])
