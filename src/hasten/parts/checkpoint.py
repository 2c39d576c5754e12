"""A checkpoint on disk: a folder that appears whole, by one rename, or not at all.

    save: .writing-step-00000120-<pid>/ -> state.safetensors, manifest.json (size and hash of the
          first, hash of itself) -> fsync both and the folder -> rename to step-00000120 -> fsync
          the parent
    load: newest first; what its manifest does not confirm is renamed out of the way, and the one
          before it is tried

Nothing is pickled, so loading a checkpoint can't run code; nothing is overwritten in place, so a
kill at any instant leaves the older checkpoints as they were. One process at a time writes into a
folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

STATE, MANIFEST = "state.safetensors", "manifest.json"
FORMAT = 1


class DamagedCheckpointError(ValueError):
    """A checkpoint isn't what its manifest says."""


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write ``tensors`` and the JSON-ready ``meta`` as the checkpoint of ``step``; its path.

    Raises:
        OSError: the disk is full or read-only; no checkpoint was touched.
        RuntimeError: two tensors share memory, as tied weights do; give one of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    if final.exists():  # the same step again, after a resume: the older one is as good
        return final
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_state(temporary / STATE, tensors)
        manifest = {"format": FORMAT, "step": step, "files": {}, "meta": dict(meta)}
        manifest["files"] = {STATE: _fingerprint(temporary / STATE)}
        (temporary / MANIFEST).write_bytes(_sealed(manifest))
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
        ValueError: another version of this program wrote it.
    """
    manifest = _manifest(path)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')} and this version reads {FORMAT}; "
            "go on with the version that wrote it"
        )
    try:
        expected, found = manifest["files"][STATE], _fingerprint(path / STATE)
        if found != expected:
            raise ValueError(f"{STATE} is {found} instead of {expected}")
        return safetensors.torch.load_file(path / STATE), manifest["meta"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{path}: {error!r}") from error


def load_latest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path] | None:
    """The newest checkpoint that verifies, or None; damaged ones are renamed ``.damaged-*``."""
    for path in reversed(checkpoints(folder)):
        try:
            return *load(path), path
        except DamagedCheckpointError:
            # Another rank may have been faster, and a folder may be read-only: neither is a
            # reason to not go on to the one before.
            with contextlib.suppress(OSError):
                path.rename(path.with_name(f".damaged-{path.name}-{time.time_ns()}"))
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; anything with another name is not one."""
    if not folder.is_dir():
        return []
    found = (p for p in folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what a killed process left half done.

    Raises:
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint is kept")
    for path in checkpoints(folder)[:-keep]:
        path.rename(path.with_name(f".deleting-{path.name}-{os.getpid()}"))
    for path in list(folder.glob(".*-step-*")):
        if re.fullmatch(r"\.(writing|deleting)-step-\d{8,}-\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)


def _write_state(path: Path, tensors: Mapping[str, Tensor]) -> None:
    whole = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        safetensors.torch.save_file(whole, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(f"{path}: {error}") from error


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, every byte of it as it was written."""
    try:
        text = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(text)
        del manifest["seal"]
        if _sealed(manifest) != text:
            raise ValueError(f"{MANIFEST} is not as it was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path}: {error!r}") from error
    return manifest


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it stands on disk: its JSON with the hash of that JSON as the last key."""
    seal = xxhash.xxh3_128_hexdigest(json.dumps(manifest, indent=1).encode())
    return json.dumps({**manifest, "seal": seal}, indent=1).encode()


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
