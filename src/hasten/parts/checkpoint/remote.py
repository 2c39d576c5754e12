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
import importlib
import re
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hasten.machine.locks import HeldLock
from hasten.parts.checkpoint.chunks import CheckpointTensors
from hasten.parts.checkpoint.commit import UNDONE, difference, in_share, manifest_of, opened
from hasten.parts.checkpoint.format import (
    DESCRIPTION,
    LARGEST_MANIFEST,
    MANIFEST,
    STEP,
    TENSORS,
    DamagedCheckpointError,
    NewerFormatError,
    manifest_text,
    part_name,
    read_manifest,
)
from hasten.parts.checkpoint.ranks import Board

EACH = 1.0  # seconds from one sign of life to the next
_PART = re.compile(rf"rank-\d{{5}}\.({TENSORS}|{DESCRIPTION})")


def is_address(folder: str) -> bool:
    """Returns True if ``folder`` is an address and not a local folder."""
    return "://" in folder


class Address:
    """The checkpoints at an address. All methods may raise OSError.

    Raises:
        ValueError: fsspec, or the library for this kind of address, isn't installed.
    """

    def __init__(self, address: str) -> None:
        try:
            fsspec: Any = importlib.import_module("fsspec")
            self._files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"{address} can't be used as a folder for checkpoints: {error}; install fsspec "
                "and its library for such addresses"
            ) from error
        self.address, self._root = address, str(root)

    def board(self, name: str = "") -> AddressBoard:
        """Returns the small files in a folder at the address."""
        return AddressBoard(self, name)

    def names(self) -> list[str]:
        """The checkpoints that are whole there, oldest first."""
        names = [name for name in self.sizes("") if STEP.fullmatch(name)]
        whole = [name for name in names if MANIFEST in self.sizes(name)]
        return sorted(whole, key=lambda name: int(name.removeprefix("step-")))

    def send_part(self, folder: Path, name: str, rank: int) -> None:
        """Sends the two files of a rank to the checkpoint ``name``."""
        self.call("makedirs", name, exist_ok=True)
        for kind in (TENSORS, DESCRIPTION):
            file = part_name(rank, kind)
            self._try("put_file", str(folder / file), self._path(f"{name}/{file}"))

    def commit(self, name: str, board: Board, ranks: int, meta: Mapping[str, Any]) -> int:
        """Makes a checkpoint of the parts that have arrived; returns its bytes.

        Raises:
            OSError: a part isn't there.
        """
        texts = [board.read(part_name(rank, DESCRIPTION)) for rank in range(ranks)]
        manifest = manifest_of(texts, int(name.removeprefix("step-")), meta)
        sizes, total = self.sizes(name), 0
        for file, expected in manifest["files"].items():
            if sizes.get(file) != expected["bytes"]:
                raise OSError(f"{file} of {name} was sent and hasn't arrived")
            total += expected["bytes"]
        self.call("pipe_file", f"{name}/{MANIFEST}", manifest_text(manifest))
        return total

    def read(
        self, name: str, folder: Path, share: tuple[int, int]
    ) -> tuple[CheckpointTensors, dict[str, Any], Path]:
        """Returns tensors, meta, and the local folder of a checkpoint, which has what was fetched.

        Args:
            folder: for fetched files; the ranks of a host may have one in common.
            share: (rank, ranks): this rank's share of the files is compared now, and others when
                they are read.

        Raises:
            DamagedCheckpointError: it isn't as it was written.
        """
        text = self._manifest(name)
        # The same step may be written again, so the folder is that of these contents.
        path = folder / f"fetched-{xxhash.xxh3_64_hexdigest(text)}" / name
        manifest = read_manifest(path, text)
        path.mkdir(parents=True, exist_ok=True)
        with closing(HeldLock(path / ".lock", None)):
            (path / MANIFEST).write_bytes(text)
        fetch = partial(self._fetch, path, manifest["files"])
        for number, file in enumerate(manifest["files"]):
            if file.endswith(DESCRIPTION) or in_share(number, share):
                fetch(file)
        return *opened(path, manifest, share[0], fetch), path

    def _fetch(self, path: Path, files: Mapping[str, Any], file: str) -> None:
        """Brings a file, unless it is there already."""
        with closing(HeldLock(path / f".{file}.lock", None)):
            if (path / file).exists():
                return
            coming = path / f"{file}.new"
            try:
                self._try("get_file", self._path(f"{path.name}/{file}"), str(coming))
                reason = difference(coming, files[file])
            except FileNotFoundError:
                reason = "is missing"
            if reason:
                raise DamagedCheckpointError(f"{self.address}/{path.name}: {file} {reason}")
            coming.rename(path / file)

    def prune(self, keep: int) -> None:
        """Deletes all checkpoints but the newest ``keep``: files that a manifest of ours lists."""
        for name in self.names()[:-keep]:
            # One by one: `rm` would take brackets for a pattern.
            for file in self._listed(name):
                self.call("rm_file", f"{name}/{file}")
            self._remove_folder(name)

    def sweep(self, run: str = "") -> None:
        """Deletes what saves of a run, or of any, left half done."""
        for undone in self.sizes(""):
            match = UNDONE.fullmatch(undone)
            if match is None or (run and f"-{run}-" not in undone):
                continue
            parts = self.sizes(match[1])
            for file in parts if MANIFEST not in parts else ():
                if _PART.fullmatch(file):
                    self.call("rm_file", f"{match[1]}/{file}")
            for file in self.sizes(undone):
                self.call("rm_file", f"{undone}/{file}")
            self._remove_folder(undone)

    def archive(self, step: int) -> list[str]:
        """Moves the manifests of checkpoints after ``step`` away; returns their names."""
        names = [name for name in self.names() if int(name.removeprefix("step-")) > step]
        for name in names:
            self.move_manifest(name, "aside")
        return names

    def move_manifest(self, name: str, why: str) -> None:
        """Moves the manifest away: the checkpoint no longer counts and can be sent again."""
        manifest = self._path(f"{name}/{MANIFEST}")
        self._try("cp_file", manifest, f"{manifest}.{why}")
        self._try("rm_file", manifest)

    def _listed(self, name: str) -> list[str]:
        """Returns the files of a checkpoint, the manifest first; none if it isn't ours."""
        with contextlib.suppress(DamagedCheckpointError, NewerFormatError):
            return [MANIFEST, *read_manifest(Path(name), self._manifest(name))["files"]]
        return []

    def _manifest(self, name: str) -> bytes:
        try:
            text: bytes = self.call("cat_file", f"{name}/{MANIFEST}", end=LARGEST_MANIFEST)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{self.address}/{name}: it has no {MANIFEST}") from None
        return text

    def _remove_folder(self, name: str) -> None:
        with contextlib.suppress(OSError, NotImplementedError):
            self.call("rmdir", name)  # where folders are things of their own

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the size of each file in a folder at the address, without what was cached."""
        self._try("invalidate_cache")
        try:
            listed = self.call("ls", name, detail=True)
        except FileNotFoundError:
            return {}
        entries = {str(e["name"]).rstrip("/").rpartition("/")[2]: e["size"] for e in listed}
        return {file: int(size or 0) for file, size in entries.items()}

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


class AddressBoard:
    """A board at an address: files of other sizes after each sign of life."""

    def __init__(self, address: Address, name: str) -> None:
        self._address, self._name = address, name
        self.place, self.each = f"the address {address.address}", EACH

    def open(self) -> None:
        self._address.call("makedirs", self._name, exist_ok=True)

    def put(self, name: str, text: bytes) -> None:
        self._address.call("pipe_file", f"{self._name}/{name}", text)

    def read(self, name: str) -> bytes:
        text: bytes = self._address.call("cat_file", f"{self._name}/{name}")
        return text

    def look(self) -> dict[str, Any]:
        return self._address.sizes(self._name)

    def remove(self, name: str) -> None:
        self._address.call("rm_file", f"{self._name}/{name}")
