"""Checkpoints in a folder: complete or absent, one committing process, the newest stay.

    .writing-step-00000120-RUN/   a name that no process reads
        rank-00000.safetensors    written once, through both hashes; forced to the disk

        rank-00000.json           the chunks in it, and its hashes; complete once it is there

        manifest.json             sizes and hashes of all files, sealed; forced to the disk
    force the folder -> rename it to step-00000120 -> force the parent

Each rank writes its two files by itself. The first rank waits until all descriptions are
there, writes the manifest and renames: no rank sends a message.

Nothing is pickled, so loading a checkpoint can't run code. Nothing is overwritten in
position. So a kill or a loss of power at any instant leaves the older checkpoints
unchanged.

Only contents that the manifests confirm are returned:

- load: read every file through its hash -> tensors as they were saved
- load_latest: newest first. A damaged checkpoint is renamed with its reason, and the
  one before it is tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from hasten.foreign_files import open_regular
from hasten.machine.locks import HeldLock, LockedError
from hasten.parts.checkpoint.chunks import CheckpointTensors, ChunkPosition, sound
from hasten.parts.checkpoint.format import (
    BLOCK,
    DESCRIPTION,
    DTYPES,
    FORMAT,
    LAST_STEP,
    MANIFEST,
    PASSING,
    STEP,
    TENSORS,
    DamagedCheckpointError,
    Disk,
    NewerFormatError,
    checkpoints,
    manifest_text,
    part_name,
    quarantine,
    read_manifest,
    read_part,
    write_blocks,
    write_tensors,
)

LOCAL = Disk()
LOCK = ".lock"  # of the folder, there as long as its writer


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    coded: Mapping[str, Any] | None = None,
    disk: Disk = LOCAL,
) -> Path:
    """Writes ``tensors`` and JSON-ready ``meta`` as the checkpoint of ``step``; its path.

    Args:
        coded: how some of the tensors were made smaller (``compression.encode``).

    Raises:
        OSError: the disk is full or read-only; no checkpoint was touched.
        TypeError, ValueError: JSON can't represent the meta, or safetensors a tensor.
    """
    final, temporary = paths_of(folder, step, str(os.getpid()))
    new = [directory for directory in (folder, *folder.parents) if not directory.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for directory in new:  # a new name is durable once the folder above it is forced
        disk.sync(directory.parent)
    if exists_whole(final):
        disk.sync(folder)  # whoever renamed it may have been killed before this
        return final  # the same step again, after a resume: the older one is as good
    disk.remove(temporary)
    disk.make_folder(temporary)
    try:
        rank_meta = (meta.get("ranks") or [{}])[0]
        write_part(temporary, Part(0, tensors, coded=coded or {}, meta=rank_meta), disk)
        common = {key: value for key, value in meta.items() if key != "ranks"}
        commit(temporary, final, 1, common, disk)
    except BaseException:
        disk.remove(temporary)
        raise
    return final


def paths_of(folder: Path, step: int, run: str) -> tuple[Path, Path]:
    """Returns the path of the checkpoint of ``step``, and of the folder it is written into.

    Args:
        run: distinguishes the writes of a step: digits and dashes.
    """
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"step is {step}; it must lie between 0 and {LAST_STEP}")
    final = folder / f"step-{step:08d}"
    return final, folder / f".writing-{final.name}-{run}"


@dataclass(frozen=True)
class Part:
    """The contents of a rank's two files.

    Args:
        tensors: the chunks that the rank writes, on the host.
        positions: positions of those that aren't whole tensors.
        coded: form of each tensor that was made smaller.
        meta: JSON of the rank alone.
    """

    rank: int
    tensors: Mapping[str, Tensor]
    positions: Mapping[str, ChunkPosition] = field(default_factory=dict)
    coded: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Returns dtype, shape and position of each chunk."""
        return {name: self._entry(name, tensor) for name, tensor in self.tensors.items()}

    def _entry(self, name: str, tensor: Tensor) -> dict[str, Any]:
        form = self.coded.get(name)
        dtype = DTYPES.get(tensor.dtype) if form is None else form["dtype"]
        sizes = [*tensor.shape] if form is None else form["shape"]
        packed = {"packed": True} if form is not None else {}
        position = self.positions.get(name)
        if position is None or [*position.shape] == sizes:
            return {"dtype": dtype, "shape": sizes, **packed}
        return {
            "dtype": dtype,
            "shape": [*position.shape],
            "offset": [*position.offset],
            "sizes": sizes,
            **packed,
        }


def write_part(
    temporary: Path, part: Part, disk: Disk, written: Callable[[], None] | None = None
) -> None:
    """Writes a rank's tensors, and then their description under its final name.

    Args:
        written: called when only the name is missing; the file is then compared first.

    Raises:
        DamagedCheckpointError: the disk returns other bytes than it was given.
    """
    file = write_tensors(temporary / part_name(part.rank, TENSORS), part.tensors, disk)
    description = {"tensors": part.described(), "meta": dict(part.meta), "file": file}
    name = part_name(part.rank, DESCRIPTION)
    text = memoryview(json.dumps(description, separators=(",", ":")).encode())
    write_blocks(temporary / f"{name}.new", iter([text]), disk)
    if written is not None:
        reason = difference(temporary / part_name(part.rank, TENSORS), file)
        if reason:
            raise DamagedCheckpointError(f"{temporary}: {name} {reason}")
        written()
    disk.rename(temporary / f"{name}.new", temporary / name)


def commit(temporary: Path, final: Path, ranks: int, meta: Mapping[str, Any], disk: Disk) -> None:
    """Makes a checkpoint of the parts of all ranks, which are in ``temporary``.

    Raises:
        OSError: the disk is full or read-only, or a part is gone.
        TypeError, ValueError: JSON can't represent the meta.
    """
    texts = [(temporary / part_name(rank, DESCRIPTION)).read_bytes() for rank in range(ranks)]
    manifest = manifest_of(texts, int(final.name.removeprefix("step-")), meta)
    write_blocks(temporary / MANIFEST, iter([memoryview(manifest_text(manifest))]), disk)
    disk.sync(temporary)
    disk.rename(temporary, final)
    disk.sync(final.parent)


def manifest_of(texts: Sequence[bytes], step: int, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Args:
        texts: the description of each rank's part.
    """
    files, packed = {}, False
    for rank, text in enumerate(texts):
        name, description = part_name(rank, DESCRIPTION), json.loads(text)
        files[part_name(rank, TENSORS)] = description["file"]
        files[name] = {
            "bytes": len(text),
            "xxh3_128": xxhash.xxh3_128_hexdigest(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        packed |= any(entry.get("packed") for entry in description["tensors"].values())
    return {
        "format": FORMAT,
        "step": step,
        "ranks": len(texts),
        "packed": packed,
        "files": files,
        "meta": dict(meta),
    }


def exists_whole(path: Path) -> bool:
    """Returns True if a complete checkpoint is there; a damaged one is moved out of the way."""
    return os.path.lexists(path) and _is_whole(path)


def _is_whole(path: Path) -> bool:
    """True if a complete checkpoint of this step exists; a damaged one would block its path."""
    try:
        verify(path)
    except DamagedCheckpointError as error:
        quarantine(path, str(error))
        return False
    return True


def force_names(folder: Path, disk: Disk) -> None:
    """Force the names of a folder and of those above it to the disk, as far as it reaches.

    Whoever made them may not have done so, and with the name of one all in it would be lost.
    """
    device = folder.stat().st_dev
    for parent in folder.absolute().parents:
        with contextlib.suppress(OSError):  # not ours to open, or a disk that is full
            if parent.stat().st_dev == device:
                disk.sync(parent)


class FolderInUseError(ValueError):
    """Another process, or another checkpointer of this one, writes into the folder."""


def only_writer(folder: Path) -> HeldLock:
    """Takes the only write lock of a folder at once and holds it until it is closed.

    Raises:
        FolderInUseError: another process holds it.
        OSError: the folder doesn't exist or can't be written.
    """
    try:
        return HeldLock(folder / LOCK)
    except LockedError:
        raise FolderInUseError(
            f"{folder} is in use by another run; give this one a folder of its own, or end the "
            "other first"
        ) from None


# Which checkpoints stay: the newest few that verify; damaged ones are set apart, not deleted.
#
# What hasten did not make is never deleted: a folder goes only with a sealed manifest of ours in
# it, or with a name that only a save of ours gives to what isn't done.

_ASIDE = re.compile(r"\.aside-step-\d{8,12}-(\d+)")
UNDONE = re.compile(r"\.(?:writing|deleting)-(step-\d{8,12})-[\d-]+")
Known = MutableMapping[str, tuple[Any, ...]]  # name -> how its files stood when they verified


def prune(
    folder: Path,
    keep: int,
    verified: Known | None = None,
    noted: Callable[[Path, str], None] = lambda path, reason: None,
) -> list[Path]:
    """Deletes all verified checkpoints but the newest ``keep``; returns those that it kept.

    Unfinished files of a killed process are deleted too, and all archived checkpoints but the
    newest ``keep``.

    Args:
        verified: checkpoints that verified before. They aren't read again while size and time
            of their files stay the same. This mapping is updated.
        noted: receives each damaged checkpoint with the reason.

    Raises:
        ValueError: ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint is kept")
    verified = {} if verified is None else verified
    good: list[Path] = []
    for path in reversed(checkpoints(folder)):
        # Of a later version, or not to be read just now: neither counted nor gone.
        with contextlib.suppress(NewerFormatError, OSError):
            if len(good) >= keep:
                _delete(path)
            elif _verifies(path, verified, noted):
                good.append(path)
    for name in [name for name in verified if not (folder / name).exists()]:
        del verified[name]
    sweep(folder)
    for path in _left_aside(folder)[keep:]:
        Disk().remove(path)
    return good[::-1]


def sweep(folder: Path) -> None:
    """Delete what a killed process left half done, for whoever alone may write into the folder."""
    for path in list(folder.iterdir()):
        if UNDONE.fullmatch(path.name):
            Disk().remove(path)


def _left_aside(folder: Path) -> list[Path]:
    """Checkpoints of ways that weren't taken, whole by their manifest; the newest first."""
    archived = []
    for path in folder.iterdir():
        name = _ASIDE.fullmatch(path.name)
        if name is None or path.is_symlink():
            continue
        with contextlib.suppress(DamagedCheckpointError, NewerFormatError, OSError):
            read_manifest(path)
            archived.append((int(name[1]), path))
    return [path for _, path in sorted(archived, reverse=True)]


def _verifies(path: Path, verified: Known, noted: Callable[[Path, str], None]) -> bool:
    try:
        now = stands(path)
        if verified.get(path.name) != now:
            verified.pop(path.name, None)
            verify(path)
            verified[path.name] = now
    except (DamagedCheckpointError, OSError) as error:
        if getattr(error, "errno", None) in PASSING:
            raise
        quarantine(path, str(error))
        noted(path, str(error))
        return False
    return True


def stands(path: Path) -> tuple[Any, ...]:
    """Size and time of every file: what accidents and editors change, bad memory cells don't."""
    file_stats = []
    for entry in sorted(os.scandir(path), key=lambda e: e.name):
        facts = entry.stat(follow_symlinks=False)
        file_stats.append((entry.name, facts.st_size, facts.st_mtime_ns))
    return tuple(file_stats)


def _delete(path: Path) -> None:
    """Delete a checkpoint of ours, whole or not; what has no manifest of ours isn't touched."""
    try:
        read_manifest(path)
    except DamagedCheckpointError as error:
        if (path / MANIFEST).is_file() and not path.is_symlink():
            quarantine(path, str(error))
        return
    gone = path.with_name(f".deleting-{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        path.rename(gone)
        Disk().remove(gone)


State = tuple[dict[str, Tensor], dict[str, Any]]


def verify(path: Path, thorough: bool = False, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Returns the manifest of a checkpoint if every byte is as it was written.

    Args:
        thorough: compare sha256 as well, three to ten times slower.
        share: (rank, ranks): only this rank's share of the files is compared.

    Raises:
        DamagedCheckpointError: a file is missing, or differs from the written one.
        NewerFormatError: a later version of this program wrote it.
        OSError: this process has no file or memory left for reading.
    """
    manifest = read_manifest(path)
    if STEP.fullmatch(path.name) and int(path.name.removeprefix("step-")) != manifest["step"]:
        raise DamagedCheckpointError(f"{path}: it is the checkpoint of step {manifest['step']}")
    for number, (name, expected) in enumerate(manifest["files"].items()):
        if not in_share(number, share):
            continue
        reason = difference(path / name, expected, thorough)
        if reason:
            raise DamagedCheckpointError(f"{path}: {name} {reason}")
    return manifest


def in_share(number: int, share: tuple[int, int]) -> bool:
    """Returns True if (rank, ranks) compares the file of this number in the manifest.

    A rank's two files have neighbouring numbers. So with the same ranks as before, each compares
    what it reads next.
    """
    rank, ranks = share
    return number // 2 % ranks == rank


def load(path: Path) -> State:
    """Tensors and meta of one checkpoint, verified.

    Raises:
        DamagedCheckpointError: as ``verify``, or a file isn't safetensors.
        NewerFormatError: a later version of this program wrote it.
        MemoryError, OSError: this process has no memory or file left for it; it may well be whole.
    """
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

    ``ranks`` in the meta has the JSON of each rank, if they have any.

    Args:
        rank: the file of this rank is preferred if several hold a tensor.
        fetch: called with the name of a file of tensors before it is opened.

    Raises:
        DamagedCheckpointError: the descriptions of its files don't fit together.
    """
    files = manifest["files"]
    parts = [
        read_part(path, rank, files[part_name(rank, DESCRIPTION)])
        for rank in range(manifest["ranks"])
    ]
    with sound(path):
        ranks = [part["meta"] for part in parts]
        meta = {**manifest["meta"], **({"ranks": ranks} if any(ranks) else {})}
        return CheckpointTensors(path, parts, rank, fetch), meta


def load_latest(
    folder: Path, noted: Callable[[Path, str], None] = lambda path, reason: None
) -> tuple[dict[str, Tensor], dict[str, Any], Path] | None:
    """Returns the newest checkpoint that verifies, or None.

    Damaged ones are renamed ``.damaged-*``.

    Args:
        noted: receives each damaged checkpoint with the reason.

    Raises:
        NewerFormatError: the newest undamaged one is of a later version of this program.
    """
    for path in reversed(checkpoints(folder)):
        try:
            return *load(path), path
        except DamagedCheckpointError as error:
            quarantine(path, str(error))
            noted(path, str(error))
    return None


def difference(file: Path, expected: Mapping[str, Any], thorough: bool = False) -> str:
    """Returns how a file differs from its size and hashes, or an empty string."""
    wanted = {key: expected[key] for key in ("xxh3_128", "sha256")}
    if not thorough:
        del wanted["sha256"]
    try:
        with open_regular(file, follow_links=False) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != expected["bytes"]:
                return f"has {size} bytes instead of {expected['bytes']}"
            digests = {"xxh3_128": xxhash.xxh3_128(), "sha256": hashlib.sha256()}
            block = bytearray(min(BLOCK, size) or 1)
            while count := opened.readinto(block):
                for key in wanted:
                    digests[key].update(memoryview(block)[:count])
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno in PASSING:
            raise
        return f"can't be read: {error}"
    wrong = [key for key in wanted if digests[key].hexdigest() != wanted[key]]
    return f"is not as it was written ({wrong[0]} differs)" if wrong else ""
