"""Checkpoints at a remote address that fsspec supports, such as s3://bucket/run.

Such targets have no rename. So files are sent first and the manifest last. A checkpoint
counts once its manifest is there. On deletion the manifest is removed first. Fetched
files are verified like any others.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hasten.parts.checkpoint.commit import verify
from hasten.parts.checkpoint.format import (
    MANIFEST,
    STEP,
    DamagedCheckpointError,
    NewerFormatError,
    checkpoints,
    quarantine,
    read_manifest,
)


def is_address(folder: str) -> bool:
    """Returns True if ``folder`` is an address and not a local folder."""
    return "://" in folder


class Mirror:
    """A folder at an address, holding the same checkpoints as a local one.

    Raises:
        ValueError: fsspec, or the library for this kind of address, isn't installed.
    """

    def __init__(self, address: str) -> None:
        try:
            fsspec: Any = importlib.import_module("fsspec")
            self._files, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"{address} can't be used as a folder for checkpoints: {error}; install fsspec "
                "and its library for such addresses"
            ) from error
        self.address = address

    def send(self, path: Path) -> None:
        """Copy a committed checkpoint there, the manifest last."""
        if path.name in self.names():
            return
        remote_folder = f"{self._root}/{path.name}"
        self._files.makedirs(remote_folder, exist_ok=True)
        for name in [*read_manifest(path)["files"], MANIFEST]:
            self._files.put_file(str(path / name), f"{remote_folder}/{name}")

    def names(self) -> list[str]:
        """The checkpoints that are whole there, oldest first."""
        self._files.invalidate_cache()
        try:
            listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (str(name).rstrip("/").rpartition("/")[2] for name in listed)
        complete_names = [
            name
            for name in names
            if STEP.fullmatch(name) and self._files.exists(f"{self._root}/{name}/{MANIFEST}")
        ]
        return sorted(complete_names, key=lambda name: int(name.removeprefix("step-")))

    def keep(self, local: Path) -> None:
        """Delete there what ``local`` keeps no more: files that a manifest of ours lists."""
        local_names = {path.name for path in checkpoints(local)}
        for name in self.names():
            if name not in local_names:
                remote_folder = f"{self._root}/{name}"
                files = self._listed(remote_folder)
                for file in files:  # one by one: `rm` would take brackets for a pattern
                    self._files.rm_file(f"{remote_folder}/{file}")
                with contextlib.suppress(OSError, NotImplementedError):
                    self._files.rmdir(remote_folder)  # where folders are things of their own

    def archive(self, step: int) -> list[str]:
        """Take the manifests of checkpoints after ``step`` from their places; their names."""
        names = [name for name in self.names() if int(name.removeprefix("step-")) > step]
        for name in names:
            self._move_manifest(name, "aside")
        return names

    def fetch(self, local: Path, noted: Callable[[Path, str], None]) -> None:
        """Bring what is there and not here, newest first, until one has come whole."""
        for name in reversed(self.names()):
            if (local / name).exists():
                return
            try:
                self.bring(name, local)
                return
            except DamagedCheckpointError as error:
                noted(local / name, f"at {self.address}: {error}")
                self._move_manifest(name, "damaged")

    def bring(self, name: str, local: Path) -> None:
        """Fetch one checkpoint and verify it.

        Raises:
            DamagedCheckpointError: it isn't as it was written.
        """
        coming = local / f".writing-{name}-{os.getpid()}"
        shutil.rmtree(coming, ignore_errors=True)
        coming.mkdir()
        try:
            self._files.get_file(f"{self._root}/{name}/{MANIFEST}", str(coming / MANIFEST))
            for file in read_manifest(coming)["files"]:
                with contextlib.suppress(FileNotFoundError):  # verifying finds it
                    self._files.get_file(f"{self._root}/{name}/{file}", str(coming / file))
            os.rename(coming, local / name)
            verify(local / name)
        except DamagedCheckpointError as error:
            if (local / name).exists():
                quarantine(local / name, str(error))
            raise
        finally:
            shutil.rmtree(coming, ignore_errors=True)

    def _move_manifest(self, name: str, why: str) -> None:
        """Moves the manifest away: the checkpoint no longer counts and can be sent again."""
        manifest = f"{self._root}/{name}/{MANIFEST}"
        self._files.cp_file(manifest, f"{manifest}.{why}")
        self._files.rm_file(manifest)

    def _listed(self, remote_folder: str) -> list[str]:
        """The files of a checkpoint, the manifest first; none where it isn't ours."""
        with tempfile.TemporaryDirectory() as temp_folder:
            self._files.get_file(f"{remote_folder}/{MANIFEST}", f"{temp_folder}/{MANIFEST}")
            with contextlib.suppress(DamagedCheckpointError, NewerFormatError):
                return [MANIFEST, *read_manifest(Path(temp_folder))["files"]]
        return []
