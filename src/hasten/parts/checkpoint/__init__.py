"""Checkpoints that are complete or absent, verified when read, and cheap.

| module | purpose |
|---|---|
| ``smart_checkpointer`` | saves protected objects as often as useful, restores them |
| ``saver`` | the whole folder, in the background; reports a slow target |
| ``commit``, ``verify`` | one checkpoint to the disk and back, and how many stay |
| ``state``, ``format`` | the contents, and their format on disk |
| ``frozen`` | weights that stay out of checkpoints |
| ``compression`` | smaller checkpoints, if that is faster |
| ``remote`` | any address that fsspec supports |
"""

from __future__ import annotations

from hasten.parts.checkpoint.commit import load, verify
from hasten.parts.checkpoint.format import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    NewerFormatError,
    checkpoints,
)
from hasten.parts.checkpoint.saver import FolderInUseError
from hasten.parts.checkpoint.smart_checkpointer import SmartCheckpointer

__all__ = [
    "MANIFEST",
    "STATE",
    "DamagedCheckpointError",
    "FolderInUseError",
    "NewerFormatError",
    "SmartCheckpointer",
    "checkpoints",
    "load",
    "verify",
]
