"""Checkpoints that are complete or absent, verified when read, and cheap.

``SmartCheckpointer`` saves as often as useful. A ``Saver`` writes to a place in the background: a
``Folder``, or an ``Address`` of fsspec.
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
