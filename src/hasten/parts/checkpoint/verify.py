"""Reads checkpoints, and returns only contents that their manifests confirm.

- load: read every file through its hash -> tensors as they were saved
- load_latest: newest first. A damaged checkpoint is renamed with its reason, and the
  one before it is tried.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from hasten.foreign_files import open_regular
from hasten.parts.checkpoint.format import (
    BLOCK,
    PASSING,
    STEP,
    DamagedCheckpointError,
    checkpoints,
    decode,
    quarantine,
    read_manifest,
)

State = tuple[dict[str, Tensor], dict[str, Any]]
# What files of another shape raise; what has verified is of another shape only if it was forged.
MALFORMED = (
    *(OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, AttributeError),
    SafetensorError,
)
NO_MEMORY = "allocate memory"  # in the words of torch, which raises RuntimeError for it


def verify(path: Path, thorough: bool = False) -> dict[str, Any]:
    """Returns the manifest of a checkpoint if every byte is as it was written.

    Args:
        thorough: compare sha256 as well, three to ten times slower.

    Raises:
        DamagedCheckpointError: a file is missing, or differs from the written one.
        NewerFormatError: a later version of this program wrote it.
        OSError: this process has no file or memory left for reading.
    """
    manifest = read_manifest(path)
    if STEP.fullmatch(path.name) and int(path.name.removeprefix("step-")) != manifest["step"]:
        raise DamagedCheckpointError(f"{path}: it is the checkpoint of step {manifest['step']}")
    for name, expected in manifest["files"].items():
        reason = _difference(path / name, expected, thorough)
        if reason:
            raise DamagedCheckpointError(f"{path}: {name} {reason}")
    return manifest


def load(path: Path) -> State:
    """Tensors and meta of one checkpoint, verified.

    Raises:
        DamagedCheckpointError: as ``verify``, or a file isn't safetensors.
        NewerFormatError: a later version of this program wrote it.
        MemoryError, OSError: this process has no memory or file left for it; it may well be whole.
    """
    manifest = verify(path)
    try:
        stored: dict[str, Tensor] = {}
        for name in manifest["files"]:
            if name.endswith(".safetensors"):
                stored |= safetensors.torch.load_file(path / name)
        for name, form in (manifest.get("coded") or {}).items():
            stored[name] = decode(stored[name], form)
        return stored, manifest["meta"]
    except MALFORMED as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        if isinstance(error, RuntimeError) and NO_MEMORY in str(error):
            raise MemoryError(f"{path} can't be held: {error}") from error
        raise DamagedCheckpointError(f"{path}: {error!r}") from error


def load_latest(
    folder: Path, noted: Callable[[Path, str], None] = lambda path, reason: None
) -> tuple[dict[str, Tensor], dict[str, Any], Path] | None:
    """Returns the newest checkpoint that verifies, or None.

    Damaged ones are renamed ``.damaged-*``.

    Args:
        noted: receives each damaged checkpoint with the reason.

    Raises:
        NewerFormatError: the newest undamaged one is of a later version of this program.
    """
    for path in reversed(checkpoints(folder)):
        try:
            return *load(path), path
        except DamagedCheckpointError as error:
            quarantine(path, str(error))
            noted(path, str(error))
    return None


def _difference(file: Path, expected: Mapping[str, Any], thorough: bool) -> str:
    """Returns the problem of a file, or an empty string."""
    wanted = {key: expected[key] for key in ("xxh3_128", "sha256")}
    if not thorough:
        del wanted["sha256"]
    try:
        with open_regular(file, follow_links=False) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != expected["bytes"]:
                return f"has {size} bytes instead of {expected['bytes']}"
            digests = {"xxh3_128": xxhash.xxh3_128(), "sha256": hashlib.sha256()}
            block = bytearray(min(BLOCK, size) or 1)
            while count := opened.readinto(block):
                for key in wanted:
                    digests[key].update(memoryview(block)[:count])
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno in PASSING:
            raise
        return f"can't be read: {error}"
    wrong = [key for key, value in wanted.items() if digests[key].hexdigest() != value]
    return f"is not as it was written ({wrong[0]} differs)" if wrong else ""
