"""A checkpoint on disk: a folder that appears whole, by one rename, or not at all.

    .writing-step-00000120-<pid>/   a name that nobody reads
        state.safetensors           written once, through both hashes; forced to the disk
        manifest.json               sizes and hashes, sealed; forced to the disk
    force the folder -> rename it to step-00000120 -> force the parent

Nothing is pickled, so loading a checkpoint can't run code; nothing is overwritten in place, so a
kill or a loss of power at any instant leaves the older checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hasten.parts.checkpoint.disk import Disk
from hasten.parts.checkpoint.folder import quarantine
from hasten.parts.checkpoint.manifest import (
    FORMAT,
    LAST_STEP,
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    sealed,
)
from hasten.parts.checkpoint.tensor_file import write_blocks, write_tensors
from hasten.parts.checkpoint.verify import verify

LOCAL = Disk()


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    coded: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Write ``tensors`` and the JSON-ready ``meta`` as the checkpoint of ``step``; its path.

    Args:
        coded: how some of the tensors were made smaller (``shuffle.encode``).
        base: the checkpoint that differences among them refer to: name and seal.

    Raises:
        OSError: the disk is full or read-only; no checkpoint was touched.
        TypeError, ValueError: JSON can't say the meta, or safetensors can't hold a tensor.
    """
    final = folder / f"step-{step:08d}"
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"step is {step}; it must lie between 0 and {LAST_STEP}")
    _make_durably(folder, disk)
    if os.path.lexists(final) and _is_whole(final):
        disk.sync(folder)  # whoever renamed it may have been killed before this
        return final  # the same step again, after a resume: the older one is as good
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    disk.remove(temporary)
    disk.make_folder(temporary)
    try:
        files = {STATE: write_tensors(temporary / STATE, tensors, disk)}
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": files,
            "coded": dict(coded or {}),
            "base": dict(base) if base else None,
            "meta": dict(meta),
        }
        write_blocks(temporary / MANIFEST, iter([memoryview(sealed(manifest))]), disk)
        disk.sync(temporary)
        disk.rename(temporary, final)
    except BaseException:
        disk.remove(temporary)
        raise
    disk.sync(folder)
    return final


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint of this step is there; a damaged one would block its place forever."""
    try:
        verify(path)
    except DamagedCheckpointError as error:
        quarantine(path, str(error))
        return False
    return True


def force_names(folder: Path, disk: Disk) -> None:
    """Force the names of a folder and of those above it to the disk, as far as it reaches.

    Whoever made them may not have done so, and with the name of one all in it would be lost.
    """
    device = folder.stat().st_dev
    for place in folder.absolute().parents:
        with contextlib.suppress(OSError):  # not ours to open, or a disk that is full
            if place.stat().st_dev == device:
                disk.sync(place)


def _make_durably(folder: Path, disk: Disk) -> None:
    """The folder with its parents; a new name is durable once the folder above it is forced."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        disk.sync(place.parent)
