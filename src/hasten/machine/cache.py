"""Cache of results on disk, one JSON file each, named by a hash of what decides the result.

A file is read if it exists, is valid, and only this user may write it and its folder. A
result is computed again if its file can't be used: without a home, on a full disk, with a
damaged file or another user's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hasten.foreign_files import open_regular
from hasten.machine.files import replacing

HOME = Path("~/.cache/hasten")
PACKAGE = Path(__file__).parents[1]
SOURCES = {".py", ".cpp", ".h", ".cu"}
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


def key_of(parts: Mapping[str, Any]) -> str:
    """Returns sixteen hexadecimal digits: a hash of everything that decides a result."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_digest(package: Path = PACKAGE, *patterns: str) -> str:
    """Returns one hash of the sources of a package, or of those that match the patterns."""
    digest = hashlib.sha256()
    for path in sorted({path for each in patterns or ("**/*",) for path in package.glob(each)}):
        if path.suffix in SOURCES and path.is_file():
            digest.update(path.relative_to(package).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def at_home(folder: Path) -> Path:
    """Returns the folder with the user's home instead of ``~``; unchanged without a home."""
    with contextlib.suppress(RuntimeError):
        return folder.expanduser()
    return folder


def path_of(folder: Path, parts: Mapping[str, Any], stem: str = "") -> Path:
    """Returns the path of a result in a folder, by its key."""
    return at_home(folder) / f"{stem}{key_of(parts)}.json"


def is_private(status: os.stat_result) -> bool:
    """Returns True if a file or folder is this user's and only this user may write it."""
    if os.name != "posix":
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(path: Path, build: Callable[[Any], T], instead: str) -> T | None:
    """Returns a stored result; None if there is no usable one.

    Args:
        build: makes the result from the parsed JSON; its exceptions count as damage.
        instead: text for the warning: the action taken without the file.
    """
    try:
        with open_regular(path, follow_links=False) as file:
            if all(map(is_private, (os.fstat(file.fileno()), path.parent.stat()))):
                return build(json.load(file))
        _LOG.warning(
            "%s or its folder belongs to another user or may be written by others: %s",
            path,
            instead,
        )
        return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("%s can't be read (%s): %s", path, type(error).__name__, instead)
        return None


def write(path: Path, content: Any) -> None:
    """Stores a result if possible; other processes may do the same at the same time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            if os.name == "posix":
                os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(content, indent=1).encode())
