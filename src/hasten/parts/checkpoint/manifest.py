"""The manifest of a checkpoint: what it consists of, sealed by a hash of its own text.

    {"format": 2, "step": 120, "files": {NAME: {"bytes", "xxh3_128", "sha256"}},
     "coded": {TENSOR: how it was made smaller}, "base": what differences refer to,
     "meta": the caller's JSON, "seal": hash of all the above}

The seal finds accidents, not forgers: whoever can write the folder can seal anew. So a manifest is
read as a stranger's: its size has a limit, and the names in it can't leave the folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

STATE, MANIFEST = "state.safetensors", "manifest.json"
FORMAT = 2  # 1: without sha256, codes and base; still read
LARGEST_MANIFEST = 1 << 26
STEP = re.compile(r"step-[0-9]{8,12}")
LAST_STEP = 10**12 - 1
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of the process, and say nothing of a file
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class DamagedCheckpointError(ValueError):
    """A checkpoint isn't what its manifest says."""


class NewerFormatError(ValueError):
    """A later version of this program wrote the checkpoint; it may well be whole."""


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it stands on disk: its JSON with the hash of that JSON as the last key."""
    text = json.dumps(manifest, indent=1)
    seal = xxhash.xxh3_128_hexdigest(text.encode())
    return f'{text.removesuffix("}").rstrip()},\n "seal": "{seal}"\n}}'.encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in ``path``, every byte of it as it was written.

    Raises:
        DamagedCheckpointError: it is missing, isn't as it was written, or names files elsewhere.
        NewerFormatError: a later version wrote it.
        OSError: this process has no file or memory left to read it with.
    """
    try:
        text = _bounded(path / MANIFEST)
        manifest: dict[str, Any] = json.loads(text)
        seal = manifest.pop("seal")
        if sealed(manifest) != text:
            raise ValueError(f"{MANIFEST} is not as it was written")
        newer = manifest["format"] not in range(1, FORMAT + 1)
        if not newer:
            _check(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        raise DamagedCheckpointError(f"{path}: {_reason(error)}") from error
    if newer:
        raise NewerFormatError(
            f"{path} has format {manifest['format']} and this version reads up to {FORMAT}; "
            "go on with the version that wrote it"
        )
    return {**manifest, "seal": seal}


def open_regular(path: Path) -> int:
    """A descriptor for reading a plain file: no link, no pipe that would wait for its writer.

    Raises:
        OSError: it isn't there, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is not a plain file")
    return descriptor


def _bounded(path: Path) -> bytes:
    if path.parent.is_symlink():
        raise OSError("it is a link")
    with os.fdopen(open_regular(path), "rb") as file:
        text = file.read(LARGEST_MANIFEST + 1)
    if len(text) > LARGEST_MANIFEST:
        raise ValueError(f"{path.name} is larger than {LARGEST_MANIFEST} bytes")
    return text


def _check(manifest: Mapping[str, Any]) -> None:
    """The shape of a manifest; ValueError, KeyError or TypeError where it is another."""
    files = manifest["files"]
    if not isinstance(files, dict) or not isinstance(manifest["meta"], dict) or not files:
        raise ValueError(f"{MANIFEST} lists no files or holds no meta")
    for name, found in files.items():
        if not _NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{name[:120]!r} can't be the name of a checkpoint's file")
        if not isinstance(found["bytes"], int) or not isinstance(found["xxh3_128"], str):
            raise ValueError(f"{name} has no size or no hash")
    if type(manifest["step"]) is not int or not 0 <= manifest["step"] <= LAST_STEP:
        raise ValueError(f"{manifest['step']!r} is no step")
    if not isinstance(manifest.get("coded") or {}, dict):
        raise ValueError("what is said of packed tensors isn't by name")
    base = manifest.get("base")
    if base is not None and not STEP.fullmatch(base["name"]):
        raise ValueError(f"{base['name'][:120]!r} can't be a checkpoint's name")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{Path(error.filename).name} is missing"
    if isinstance(error, KeyError):
        return f"{MANIFEST} has no {error}"
    return str(error) or type(error).__name__
