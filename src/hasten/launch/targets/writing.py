"""Launch files reach one folder, all or none, and replace nothing that somebody else wrote there.

A file is hasten's own if its first lines say so. Everything is looked at before anything is
written; each file then appears whole, by a rename.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hasten.errors import InputError
from hasten.launch.targets.job import MARK

LOOKED_AT = 4096  # bytes at the head of a file in which the mark stands


def write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write them into ``folder``, made if it isn't there; the paths.

    Raises:
        InputError: a file of that name is somebody else's, or the folder takes no files.
    """
    paths = [folder / name for name in files]
    for path in paths:
        if path.is_symlink() or (path.exists() and not _ours(path)):
            raise InputError(
                f"--output: {path} is there and wasn't written by hasten launch; name another "
                "folder, or move it away"
            )
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            temporary = folder / f".{path.name}.{os.getpid()}"
            made.append(temporary)
            temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
            temporary.chmod(0o755 if text.startswith("#!") else 0o644)
        for temporary, path in zip(made, paths, strict=True):
            temporary.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"--output: {folder} can't be written ({why}); name another folder"
        ) from error
    finally:
        for temporary in made:
            if temporary.exists():
                temporary.unlink()
    return paths


def _ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(LOOKED_AT)
    except OSError:
        return False
