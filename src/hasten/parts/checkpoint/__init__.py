"""Checkpoints that appear whole or not at all, are verified when read, and cost little.

| module | what it does |
|---|---|
| ``smart_checkpointer`` | saves what it protects as often as pays, brings it back |
| ``saver`` | the folder as a whole, beside the training; told where a place is too slow |
| ``commit``, ``verify`` | one checkpoint to the disk, back, and how many stay |
| ``state``, ``format`` | what is kept, and how it lies on disk |
| ``delta`` | smaller, where that pays |
| ``remote`` | any address that fsspec knows |
"""

from __future__ import annotations

from hasten.parts.checkpoint.commit import FolderInUseError, prune, save
from hasten.parts.checkpoint.format import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    NewerFormatError,
    checkpoints,
)
from hasten.parts.checkpoint.smart_checkpointer import SmartCheckpointer
from hasten.parts.checkpoint.verify import load, load_latest, verify

__all__ = [
    "MANIFEST",
    "STATE",
    "DamagedCheckpointError",
    "FolderInUseError",
    "NewerFormatError",
    "SmartCheckpointer",
    "checkpoints",
    "load",
    "load_latest",
    "prune",
    "save",
    "verify",
]
