"""A checkpoint on disk: a folder that appears whole, by one rename, or not at all.

    save: .writing-step-00000120-<pid>/ -> state.safetensors, manifest.json (size and hash of the
          first) -> fsync both and the folder -> rename to step-00000120 -> fsync the parent
    load: newest first; what its manifest does not confirm is renamed out of the way, and the one
          before it is tried

Nothing is pickled, so loading a checkpoint can't run code; nothing is overwritten in place, so a
kill at any instant leaves the older checkpoints as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import xxhash
from torch import Tensor

STATE, MANIFEST = "state.safetensors", "manifest.json"
FORMAT = 1


class DamagedCheckpointError(ValueError):
    """A checkpoint isn't what its manifest says."""


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write ``tensors`` and the JSON-ready ``meta`` as the checkpoint of ``step``; its path.

    Raises:
        OSError: the disk is full or read-only; no checkpoint was touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    if final.exists():  # the same step again, after a resume: the older one is as good
        return final
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        whole = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        safetensors.torch.save_file(whole, temporary / STATE)
        manifest = {"format": FORMAT, "step": step, "files": {}, "meta": dict(meta)}
        manifest["files"] = {STATE: _fingerprint(temporary / STATE)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (temporary / STATE, temporary / MANIFEST, temporary):
            _fsync(path)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _fsync(folder)
    return final


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of one checkpoint, verified against its manifest.

    Raises:
        DamagedCheckpointError: a file is missing or differs from what was written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        expected, meta = manifest["files"][STATE], manifest["meta"]
        found = _fingerprint(path / STATE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpointError(
            f"{path} has format {manifest.get('format')}; this version reads {FORMAT}"
        )
    if found != expected:
        raise DamagedCheckpointError(f"{path / STATE}: {found} instead of {expected}")
    return safetensors.torch.load_file(path / STATE), meta


def load_latest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path] | None:
    """The newest checkpoint that verifies, or None; damaged ones are renamed ``.damaged-*``."""
    for path in reversed(checkpoints(folder)):
        try:
            return *load(path), path
        except DamagedCheckpointError:
            path.rename(path.with_name(f".damaged-{path.name}-{os.getpid()}"))
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; anything with another name is not one."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        doomed = path.with_name(f".deleting-{path.name}-{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
