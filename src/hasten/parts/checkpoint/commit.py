"""Checkpoints in a folder: complete or absent, one committing process, the newest stay.

    .writing-step-00000120-RUN/   a name that no process reads
        rank-00000.safetensors    written once, through both hashes; forced to the disk; compared

        rank-00000.json           the chunks in it, and its hashes; complete once it is there

        manifest.json             sizes and hashes of all files, sealed; forced to the disk
    force the folder -> rename it to step-00000120 -> force the parent

Each rank writes its two files by itself. The first rank waits until all descriptions are
there, writes the manifest and renames: no rank sends a message.

Nothing is pickled, so loading a checkpoint can't run code. Nothing is overwritten in
position. So a kill or a loss of power at any instant leaves the older checkpoints
unchanged. Only contents that the manifests confirm are returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from hasten.parts.checkpoint.chunks import CheckpointTensors, ChunkPosition
from hasten.parts.checkpoint.format import (
    DESCRIPTION,
    DTYPES,
    FORMAT,
    MANIFEST,
    PASSING,
    REASON,
    STEP,
    TENSORS,
    DamagedCheckpointError,
    Disk,
    NewerFormatError,
    blocks_of,
    checkpoints,
    compare,
    manifest_text,
    name_of,
    part_name,
    read_manifest,
    read_text,
    sound,
    step_of,
    undone,
    write_blocks,
)

LOCAL = Disk()
Noted = Callable[[str, str], None]  # receives the name of a damaged checkpoint, and the reason


@dataclass(frozen=True)
class Part:
    """The contents of a rank's two files."""

    rank: int
    tensors: Mapping[str, Tensor]  # the chunks that the rank writes, on the host
    positions: Mapping[str, ChunkPosition]  # tensors that are whole may be absent
    meta: Mapping[str, Any]  # JSON of the rank alone
    packed: Mapping[str, Tensor] = field(default_factory=dict)  # written instead of tensors

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns dtype, shape and position of each chunk."""
        entries: dict[str, dict[str, Any]] = {}
        for name, tensor in self.tensors.items():
            sizes, position = tuple(tensor.shape), self.positions.get(name)
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": sizes}
            if position is not None and position.shape != sizes:
                where = {"shape": position.shape, "offset": position.offset, "sizes": sizes}
                entries[name] |= where
            if name in self.packed:
                entries[name]["packed"] = True
        return entries


def write_part(temporary: Path, part: Part, disk: Disk) -> None:
    """Writes a rank's tensors, compared, and their description under its name with ``.new``."""
    name = part_name(part.rank, TENSORS)
    file = write_blocks(temporary / name, blocks_of({**part.tensors, **part.packed}), disk)
    description = {"tensors": part.described(), "meta": dict(part.meta), "file": file}
    text = memoryview(json.dumps(description, separators=(",", ":")).encode())
    described = temporary / f"{part_name(part.rank, DESCRIPTION)}.new"
    expected = write_blocks(described, [text], disk)
    with sound(temporary):
        compare(temporary / name, file)
        compare(described, expected)


def manifest_of(
    read: Callable[[str], bytes], ranks: int, step: int, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the manifest of a checkpoint; ``read`` returns a part's description by its name."""
    files, packed = {}, False
    for rank in range(ranks):
        text = read(part_name(rank, DESCRIPTION))
        description = json.loads(text)
        files[part_name(rank, TENSORS)] = description["file"]
        files[part_name(rank, DESCRIPTION)] = {
            "bytes": len(text),
            "xxh3_128": xxhash.xxh3_128_hexdigest(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        packed |= any(entry.get("packed") for entry in description["tensors"].values())
    return {
        "format": FORMAT,
        "step": step,
        "ranks": ranks,
        "packed": packed,
        "files": files,
        "meta": dict(meta),
    }


# Which checkpoints stay: the newest few that verify; damaged ones are set apart, not deleted.
#
# What hasten did not make is never deleted: a folder goes only with a sealed manifest of ours in
# it, or with a name that only a save of ours gives to what isn't done.

_ASIDE = re.compile(r"\.aside-step-\d{8,12}-(\d+)")


class Folder:
    """A local folder of checkpoints, or of the parts of one; each method may raise OSError.

    Attributes:
        label: for messages.
        each: seconds from one sign of life to the next.
    """

    each = 0.5

    def __init__(self, path: Path, disk: Disk = LOCAL) -> None:
        self.path, self.disk, self.label = path, disk, f"the folder {path}"
        self._verified: dict[str, Any] = {}  # how the files of each stood when they verified

    def at(self, name: str) -> Folder:
        """Returns a folder in this one."""
        return Folder(self.path / name, self.disk)

    def open(self) -> None:
        """Creates the folder, if it isn't there."""
        with contextlib.suppress(FileExistsError):
            self.disk.make_folder(self.path)

    def put(self, name: str, text: bytes) -> None:
        """Writes or rewrites a small file."""
        file = self.path / name
        # A full disk has room for bytes that are overwritten in place.
        with file.open("r+b" if file.exists() else "xb") as opened:
            opened.write(text)

    def read(self, name: str) -> bytes:
        """Returns a small file's bytes."""
        return (self.path / name).read_bytes()

    def look(self) -> dict[str, Any]:
        """Returns for each small file a value that changes with each ``put``."""
        marks: dict[str, Any] = {}
        for path in self.path.iterdir():
            if path.suffix == f".{TENSORS}":
                continue
            # Opened, because shared folders remember old times.
            with contextlib.suppress(OSError), path.open("rb") as file:
                status = os.fstat(file.fileno())
                marks[path.name] = status.st_size, status.st_mtime_ns
        return marks

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, oldest first."""
        return [path.name for path in checkpoints(self.path)]

    def nbytes(self) -> int:
        """Returns the size of the checkpoints, as far as their files are visible."""
        total = 0
        for path in checkpoints(self.path):
            with contextlib.suppress(OSError):
                total += sum(size for _, size, _ in _stands(path))
        return total

    def holds(self, name: str, noted: Noted) -> bool:
        """Returns True if the checkpoint is here, as it was written; a damaged one is set aside."""
        if not os.path.lexists(self.path / name) or not self._is_whole(name, noted):
            return False
        self.disk.sync(self.path)  # whoever renamed it may have been killed before this
        return True

    def publish(self, name: str, temporary: Path, rank: int, done: Callable[[], None]) -> None:
        """Adds a rank's part; ``done`` is called just before the part is complete."""
        file = temporary / part_name(rank, DESCRIPTION)
        done()
        self.disk.rename(file.with_name(f"{file.name}.new"), file)

    def commit(self, manifest: Mapping[str, Any], temporary: Path) -> None:
        """Makes a checkpoint of the parts; TypeError if JSON can't represent the meta."""
        final = self.path / name_of(manifest["step"])
        text = memoryview(manifest_text(manifest))
        expected = write_blocks(temporary / MANIFEST, [text], self.disk)
        with sound(temporary):
            compare(temporary / MANIFEST, expected)
        self.disk.sync(temporary)
        self.disk.rename(temporary, final)
        self.disk.sync(self.path)
        self._verified[final.name] = _stands(final)  # each rank has compared its own part

    def set_aside(self, name: str, why: str, reason: str = "") -> None:
        """Renames a checkpoint: it doesn't count any more, and its step can be saved again."""
        target = self.path / f".{why}-{name}-{time.time_ns()}"
        (self.path / name).rename(target)
        with contextlib.suppress(OSError):
            if reason and target.is_dir() and not target.is_symlink():
                (target / REASON).write_text(reason + "\n", encoding="utf-8")

    def prune(self, keep: int, noted: Noted) -> None:
        """Deletes all but the newest ``keep`` that verify, and all but as many of a discarded way.

        What verified before isn't read again while size and time of its files stay the same.
        """
        good: list[str] = []
        for name in reversed(self.names()):
            # Of a later version, or not to be read just now: neither counted nor gone.
            with contextlib.suppress(NewerFormatError, OSError):
                if len(good) >= keep:
                    self._delete(name)
                elif self._is_whole(name, noted):
                    good.append(name)
        self._verified = {name: self._verified[name] for name in good}
        self.sweep()
        aside = []
        for path in self.path.iterdir():
            if match := _ASIDE.fullmatch(path.name):
                with contextlib.suppress(DamagedCheckpointError, NewerFormatError, OSError):
                    read_manifest(path)
                    aside.append((int(match[1]), path))
        for _, path in sorted(aside)[:-keep]:
            self.disk.remove(path)

    def sweep(self, run: str = "") -> None:
        """Deletes what saves of a run, or of any, left half done; for the only writer."""
        for path in list(self.path.iterdir()):
            if undone(path.name, run):
                self.disk.remove(path)

    def _is_whole(self, name: str, noted: Noted) -> bool:
        try:
            now = _stands(self.path / name)
            if self._verified.get(name) != now:
                self._verified.pop(name, None)
                verify(self.path / name)
                self._verified[name] = now
        except (DamagedCheckpointError, OSError) as error:
            if getattr(error, "errno", None) in PASSING:
                raise
            with contextlib.suppress(OSError):
                self.set_aside(name, "damaged", str(error))
            noted(name, str(error))
            return False
        return True

    def _delete(self, name: str) -> None:
        """Delete a checkpoint of ours, whole or not; what has no manifest of ours isn't touched."""
        path, gone = self.path / name, self.path / f".deleting-{name}-{os.getpid()}"
        try:
            read_manifest(path)
        except DamagedCheckpointError as error:
            if (path / MANIFEST).is_file() and not path.is_symlink():
                self.set_aside(name, "damaged", str(error))
            return
        path.rename(gone)
        self.disk.remove(gone)


def _stands(path: Path) -> tuple[Any, ...]:
    """Size and time of every file: what accidents and editors change, bad memory cells don't."""
    entries = ((entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(path))
    return tuple(sorted((name, facts.st_size, facts.st_mtime_ns) for name, facts in entries))


# Verifies checkpoints and reads them.


def verify(path: Path, thorough: bool = False, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Returns the manifest of a checkpoint if every byte is as it was written; raises as ``sound``.

    Args:
        thorough: compare sha256 as well, three to ten times slower.
        share: (rank, ranks): only this rank's share of the files is compared.
    """
    manifest = read_manifest(path)
    with sound(path):
        if STEP.fullmatch(path.name) and step_of(path.name) != manifest["step"]:
            raise ValueError(f"it is the checkpoint of step {manifest['step']}")
        for number, (name, expected) in enumerate(manifest["files"].items()):
            if in_share(number, share):
                compare(path / name, expected, thorough)
    return manifest


def in_share(number: int, share: tuple[int, int]) -> bool:
    """Returns True if (rank, ranks) compares the file of this number in the manifest."""
    rank, ranks = share
    return number // 2 % ranks == rank  # a rank's two files are neighbours: it reads them next


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of one checkpoint, verified; raises as ``sound``."""
    tensors, meta = opened(path, verify(path))
    with sound(path):
        return {name: tensors[name] for name in tensors}, meta


def opened(
    path: Path,
    manifest: Mapping[str, Any],
    rank: int = 0,
    fetch: Callable[[str], None] = lambda name: None,
) -> tuple[CheckpointTensors, dict[str, Any]]:
    """Returns the tensors of a verified checkpoint, each read when it is requested, and its meta.

    ``ranks`` in the meta has the JSON of each rank, if they have any. Raises as ``sound``.

    Args:
        rank: the file of this rank is preferred if several hold a tensor.
        fetch: called with the name of a file of tensors before it is opened.
    """
    with sound(path):
        names = [part_name(number, DESCRIPTION) for number in range(manifest["ranks"])]
        texts = {name: read_text(path / name) for name in names}
        for name, text in texts.items():
            if xxhash.xxh3_128_hexdigest(text) != manifest["files"][name]["xxh3_128"]:
                raise ValueError(f"{name} is not as it was written (xxh3_128 differs)")
        parts = [json.loads(text) for text in texts.values()]
        if not all(isinstance(part["meta"], dict) for part in parts):
            raise ValueError("a description of its chunks has no meta")
        ranks = [part["meta"] for part in parts]
        meta = {**manifest["meta"], **({"ranks": ranks} if any(ranks) else {})}
        return CheckpointTensors(path, parts, rank, fetch), meta
