"""Checkpoints at a remote address that fsspec supports, such as s3://bucket/run.

Such targets have no rename. So each rank sends its own two files, and the first rank the manifest
when all have arrived. A checkpoint counts once its manifest is there. On deletion the manifest
is removed first. No folder of the hosts needs to be shared.

    ADDRESS/.writing-step-00000120-RUN/   signs of life, and descriptions of what has arrived
    ADDRESS/step-00000120/                the files of a checkpoint

A rank that reads fetches the files that it compares and those that it needs. Each is compared with
its hash when it arrives.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hasten.machine.locks import HeldLock
from hasten.parts.checkpoint.chunks import CheckpointTensors
from hasten.parts.checkpoint.commit import Noted, in_share, opened
from hasten.parts.checkpoint.format import (
    DESCRIPTION,
    LARGEST_MANIFEST,
    MANIFEST,
    STEP,
    TENSORS,
    DamagedCheckpointError,
    NewerFormatError,
    compare,
    manifest_text,
    name_of,
    part_name,
    read_manifest,
    sound,
    step_of,
    undone,
)

_PART = re.compile(rf"rank-\d{{5}}\.({TENSORS}|{DESCRIPTION})")


class Address:
    """The checkpoints at an address, or the parts of one; methods without a text are ``Folder``'s.

    Raises:
        ValueError: fsspec, or the library for this kind of address, isn't installed.
    """

    each = 1.0

    def __init__(self, address: str) -> None:
        try:
            fsspec: Any = importlib.import_module("fsspec")
            self._files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"{address} can't be used as a folder for checkpoints: {error}; install fsspec "
                "and its library for such addresses"
            ) from error
        self.address, self.label, self._root = address, f"the address {address}", str(root)

    def at(self, name: str) -> Address:
        inside = copy.copy(self)
        inside._root = self._path(name)
        return inside

    def open(self) -> None:
        self.call("makedirs", "", exist_ok=True)

    def put(self, name: str, text: bytes) -> None:
        self.call("pipe_file", name, text)

    def read(self, name: str) -> bytes:
        text: bytes = self.call("cat_file", name, end=LARGEST_MANIFEST)
        return text

    def look(self, name: str = "") -> dict[str, int]:
        """Returns the size of each file in a folder at the address, without what was cached."""
        self._try("invalidate_cache")
        try:
            listed = self.call("ls", name, detail=True)
        except FileNotFoundError:
            return {}
        entries = {str(e["name"]).rstrip("/").rpartition("/")[2]: e["size"] for e in listed}
        return {file: int(size or 0) for file, size in entries.items()}

    def remove(self, name: str) -> None:
        self.call("rm_file", name)

    def names(self) -> list[str]:
        names = [name for name in self.look() if STEP.fullmatch(name)]
        return sorted((name for name in names if MANIFEST in self.look(name)), key=step_of)

    def holds(self, name: str, noted: Noted) -> bool:
        """Returns True if the checkpoint is there; it isn't compared."""
        return MANIFEST in self.look(name)

    def publish(self, name: str, temporary: Path, rank: int, done: Callable[[], None]) -> None:
        described = temporary / f"{part_name(rank, DESCRIPTION)}.new"
        checkpoint, board = self.at(name), self.at(temporary.name)
        for folder in (checkpoint, board):
            folder.open()
        for file in (temporary / part_name(rank, TENSORS), described):
            name = file.name.removesuffix(".new")
            self._try("put_file", str(file), checkpoint._path(name))
        done()
        board.put(name, described.read_bytes())

    def commit(self, manifest: Mapping[str, Any], temporary: Path) -> None:
        """Makes a checkpoint of the parts; OSError if one hasn't arrived."""
        name = name_of(manifest["step"])
        sizes = self.look(name)
        for file, expected in manifest["files"].items():
            if sizes.get(file) != expected["bytes"]:
                raise OSError(f"{file} of {name} was sent and hasn't arrived")
        self.put(f"{name}/{MANIFEST}", manifest_text(manifest))

    def fetched(
        self, name: str, folder: Path, share: tuple[int, int]
    ) -> tuple[CheckpointTensors, dict[str, Any], Path]:
        """Returns tensors, meta, and the local folder of a checkpoint, which has what was fetched.

        This rank's share of the files is compared now, and others when they are read.

        Args:
            folder: for fetched files; the ranks of a host may have one in common.
        """
        text = self._manifest(name)
        # The same step may be written again, so the folder is that of these contents.
        path = folder / f"fetched-{xxhash.xxh3_64_hexdigest(text)}" / name
        manifest = read_manifest(path, text)
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(HeldLock(path / ".lock", None)):
            (path / MANIFEST).write_bytes(text)
        fetch = partial(self._fetch, path, manifest["files"])
        for number, file in enumerate(manifest["files"]):
            if file.endswith(DESCRIPTION) or in_share(number, share):
                fetch(file)
        return *opened(path, manifest, share[0], fetch), path

    def _fetch(self, path: Path, files: Mapping[str, Any], file: str) -> None:
        """Brings a file, unless it is there already."""
        with contextlib.closing(HeldLock(path / f".{file}.lock", None)):
            if (path / file).exists():
                return
            coming = path / f"{file}.new"
            with contextlib.suppress(FileNotFoundError):
                self._try("get_file", self._path(f"{path.name}/{file}"), str(coming))
            with sound(f"{self.address}/{path.name}"):
                compare(coming, files[file])
            coming.rename(path / file)

    def set_aside(self, name: str, why: str, reason: str = "") -> None:
        """Moves the manifest away: the checkpoint no longer counts and can be sent again."""
        manifest = self._path(f"{name}/{MANIFEST}")
        self._try("cp_file", manifest, f"{manifest}.{why}")
        self._try("rm_file", manifest)

    def prune(self, keep: int, noted: Noted) -> None:
        """Deletes all checkpoints but the newest ``keep``: files that a manifest of ours lists."""
        for name in self.names()[:-keep]:
            with contextlib.suppress(DamagedCheckpointError, NewerFormatError):
                files = read_manifest(Path(name), self._manifest(name))["files"]
                self._delete(name, [MANIFEST, *files])

    def sweep(self, run: str = "") -> None:
        for folder in self.look():
            if name := undone(folder, run):
                parts = self.look(name)
                self._delete(name, () if MANIFEST in parts else filter(_PART.fullmatch, parts))
                self._delete(folder, self.look(folder))

    def _delete(self, name: str, files: Iterable[str]) -> None:
        """Deletes files, and the folder where folders are things of their own."""
        for file in files:  # One by one: `rm` would take brackets for a pattern.
            self.remove(f"{name}/{file}")
        with contextlib.suppress(OSError, NotImplementedError):
            self.call("rmdir", name)

    def _manifest(self, name: str) -> bytes:
        try:
            return self.read(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.address}/{name}: it has no {MANIFEST}") from None

    def call(self, function: str, name: str, *arguments: Any, **named: Any) -> Any:
        """Calls a function of the file system for a path below the address."""
        return self._try(function, self._path(name), *arguments, **named)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _try(self, function: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self._files, function)(*arguments, **named)
        except (OSError, NotImplementedError):
            raise
        except Exception as error:  # each library has errors of its own
            raise OSError(str(error) or type(error).__name__) from error
