"""Hashes of data files; they decide if prepared data is up to date.

A size and a time don't prove that a file is the same: `cp -p`, rsync and tar set times back. So
contents are hashed, once for each state of a file. A state is its device, inode, size, time of
change and status change (ctime, which no program can set back). A folder is hashed with all files
in it and in its folders, since saved data sets and tokenizers keep theirs there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from hasten.errors import InputError
from hasten.foreign_files import open_regular, read_json_object
from hasten.machine import cache

DEEPEST = 4  # levels of folders within a folder
MOST_FILES = 100_000
CONTENTS = "contents.json"  # hashes by the state of a file, in the folder of prepared data
BLOCK = 1 << 20  # bytes
# A change within the resolution of ctime after the hash isn't visible in the file's state.
SETTLED_NS = 2_000_000_000
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class ContentHashes:
    """Hashes of files' contents, stored in a file by device, inode, size and both times."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: dict[str, str] = {}
        with contextlib.suppress(InputError):  # if absent or damaged, hashes are computed again
            stored = read_json_object(path, "list of hashes")
            self._hashes = {k: v for k, v in stored.items() if isinstance(v, str)}
        self._in_use: dict[str, str] = {}

    def of(self, path: Path) -> str | None:
        """Returns the hash of a regular file's bytes, 32 hex digits; None for anything else."""
        try:
            with open_regular(path) as file:
                stat = os.fstat(file.fileno())
                times = (stat.st_mtime_ns, stat.st_ctime_ns)
                state = "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, *times)))
                settled = stat.st_ctime_ns < time.time_ns() - SETTLED_NS
                content = self._hashes.get(state) if settled else None
                if content is None:
                    digest = xxhash.xxh3_128()
                    while block := file.read(BLOCK):
                        digest.update(block)
                    content = digest.hexdigest()
        except (OSError, ValueError):  # absent, a pipe, or an impossible name
            return None
        if settled:
            self._in_use[state] = content
        return content

    def save(self) -> None:
        """Writes the hashes in use if the folder exists and one of them is new."""
        if self._path.parent.is_dir() and self._in_use.items() - self._hashes.items():
            cache.write(self._path, self._in_use)


def content_stamps(
    names: Iterable[str], output: Path, hashes: ContentHashes, without: tuple[str, ...] = ()
) -> list[list[Any]]:
    """Returns name and hash of each file, and of all files in folders.

    Files with names that end with one of ``without`` are left out of folders.

    Missing files have only a name.

    Folders are read four levels deep, because data sets and tokenizers may keep files
    there. Hidden folders, folders of runs (with a recipe.yaml) and ``output`` are skipped.
    Otherwise the files that a run writes next to its own data would cause the data to be
    prepared again.
    """
    file_stamps: list[list[Any]] = []
    waiting = [(Path(name), 0) for name in names]
    while waiting:
        path, depth = waiting.pop()
        if not os.path.isdir(path):  # unlike Path's, silent about names that no file can have
            content = hashes.of(path)
            file_stamps.append([str(path)] if content is None else [str(path.resolve()), content])
            if len(file_stamps) > MOST_FILES:
                raise InputError(
                    f"{path.parent} and the other files that the recipe names are more than "
                    f"{MOST_FILES:,}: name the files that are meant, or a smaller folder"
                )
        elif depth == 0 or not (
            depth > DEEPEST
            or path.name.startswith(".")
            or path.resolve().is_relative_to(output.resolve())
            or (path / "recipe.yaml").exists()
        ):
            with contextlib.suppress(OSError):  # whoever needs what is in it will say so
                inside = (i for i in path.iterdir() if not i.name.endswith(without or ("/",)))
                waiting += [(inner, depth + 1) for inner in inside]
    return sorted(file_stamps, key=str)
