"""Saves named tensors and JSON to a folder and back, with its lock, space and thread.

- save: copy to host memory (blocks) | copy the rest, before it changes -> pack -> write, compare
  -> send to an address -> commit -> prune (in the writer's thread)
- several ranks: each writes and sends its own chunks; the first one commits and prunes
- error: stored until the next call reports it. A full or broken disk is an alarm and
  doesn't end the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.errors import require_whole
from hasten.machine import host
from hasten.machine.locks import HeldLock, LockedError
from hasten.parts.checkpoint.chunks import CheckpointTensors, ChunkPosition
from hasten.parts.checkpoint.commit import (
    LOCAL,
    Folder,
    Part,
    manifest_of,
    opened,
    verify,
    write_part,
)
from hasten.parts.checkpoint.format import (
    DamagedCheckpointError,
    Disk,
    Packing,
    name_of,
    on_host,
    step_of,
)
from hasten.parts.checkpoint.ranks import SignOfLife, Storage, wait_for_parts
from hasten.parts.checkpoint.remote import Address

# Copies state aside and writes it in a thread, while training continues: one save at a time.


class Staging:
    """Host memory that is reused from save to save.

    Requesting it from the system again costs more time than the copy itself.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors as they are now, complete when this returns.

        They are overwritten by the next call.
        """
        self._kept = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        away = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor.detach(), non_blocking=tensor.device in away)
        for device in away:  # by name: in another thread the current device is another rank's
            torch.accelerator.synchronize(device)  # copies must be done before weights move on
        return dict(self._kept)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._kept.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        pinned = host.pins_for(tensor.device)  # pages that can't move are copied without a detour
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


class LateCopies:
    """Tensors that another thread copies, while none changes; ``done`` is set when they may."""

    def __init__(self, staging: Staging, tensors: Mapping[str, Tensor]) -> None:
        self._staging, self.tensors = staging, tensors
        self._versions = self._now()
        self.done = threading.Event()

    def take(self) -> dict[str, Tensor]:
        """Returns the copies; OSError if a tensor was changed meanwhile."""
        try:
            copies = self._staging.take(self.tensors)
            if self._now() != self._versions:
                raise OSError("weights were changed while they were copied")
            return copies
        finally:
            self.done.set()

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self.tensors.values()]  # each write raises it


class CheckpointWriter:
    """Runs one task at a time in the background; stores its error until it is requested."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Returns True if a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``, after waiting for the one before."""
        self.wait()
        # Not a daemon: an interpreter that ends waits for it, and the save gets done.
        self._thread = threading.Thread(target=self._run, args=(work,), name="hasten-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def error(self) -> BaseException | None:
        """Returns the error since the last call, once."""
        error, self._error = self._error, None
        return error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, the training thread decides about it
            self._error = error


WAITED = 1.0  # seconds that training may wait for an earlier save in silence
LONG, SLOW = 10.0, 50e6  # seconds of a write, and bytes per second: below any disk, or 0.4 Gbit/s


@dataclass
class Slowness:
    """Says, with its MB/s, that a place is slow; once, and again where it got worse.

    It matters where training waits for a write, or where one takes so long that much may be lost.
    """

    address: str
    last: tuple[int, float] = (0, 0.0)  # bytes and seconds of the last write
    _warned_speed: float = math.inf  # bytes per second at the last warning

    def due_warning(self, waited: float = 0.0) -> str:
        """Returns a warning or an empty text; training has ``waited`` seconds for the write."""
        size, seconds = self.last
        if not size or seconds <= 0:
            return ""
        speed = size / seconds
        slow = (seconds >= LONG and speed < SLOW) or waited >= WAITED
        if not slow or speed > self._warned_speed / 2:
            return ""
        self._warned_speed = speed
        waiting = f", and training waited {waited:.1f} s for it" if waited >= WAITED else ""
        return (
            f"{self.address} is slow: a checkpoint of {size / 1e6:,.1f} MB took {seconds:.1f} s, "
            f"{speed / 1e6:,.1f} MB/s{waiting}; save less often, or to a faster folder"
        )


Found = tuple[CheckpointTensors, dict[str, Any], Path]  # tensors, meta, the checkpoint


class FolderInUseError(ValueError):
    """Another process, or another checkpointer of this one, writes into the folder."""


class Saver:
    """Writes checkpoints into one folder, or to an address through a local folder.

    Args:
        folder: a local path, or an address that fsspec supports.
        keep: number of checkpoints that stay.
        compression: True measures if packing is faster, False never packs, ``shuffle`` always.
        asynchronous: write in a thread; takes host memory of one more state.

    Raises:
        ValueError: a setting is out of range, or the address can't be used.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        compression: bool | str = True,
        asynchronous: bool = True,
        disk: Disk = LOCAL,
    ) -> None:
        require_whole(max_checkpoints=keep)
        if keep < 1:
            raise ValueError(f"max_checkpoints is {keep}; at least 1 checkpoint is kept")
        self.packing = Packing(compression)
        self.address = str(folder)
        self.remote = Address(self.address) if "://" in self.address else None
        if self.remote is not None:
            folder = tempfile.mkdtemp(prefix="hasten-checkpoints-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.local = Folder(Path(folder), disk)  # this rank writes into it
        self.storage: Storage = self.remote or self.local  # of the checkpoints
        self.folder = self._fetched = self.local.path
        self.keep, self.asynchronous = keep, asynchronous
        self.alarms: list[str] = []  # problems that didn't end the run
        self.writing_seconds = 0.0
        self._lock: HeldLock | None = None
        self._staging, self._late_staging = Staging(), Staging()
        self.writer, self._copied = CheckpointWriter(), threading.Event()
        self._copied.set()  # nothing is under way
        self._slowness = Slowness(self.address)
        self.rank, self.ranks = 0, 1  # this one, and all that write parts
        self._run, self._attempts = str(os.getpid()), 0

    def open(self, expected_bytes: int = 0) -> None:
        """Take the folder, before anything is trained; again, it changes nothing.

        Raises:
            FolderInUseError: another run writes into it.
            ValueError: it can't be written, or two checkpoints of ``expected_bytes`` don't fit.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = HeldLock(self.folder / ".lock")
                self.storage.sweep()  # what was left takes room that is looked for below
            # Whoever made it and those above may not have forced their names to the disk.
            device = self.folder.stat().st_dev
            for parent in self.folder.absolute().parents:
                with contextlib.suppress(OSError):  # not ours to open, or a disk that is full
                    if parent.stat().st_dev == device:
                        self.local.disk.sync(parent)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
            free = shutil.disk_usage(self.folder).free
        except LockedError:
            raise FolderInUseError(
                f"{self.folder} is in use by another run; give this one a folder of its own, or "
                "end the other first"
            ) from None
        except OSError as error:
            raise ValueError(
                f"checkpoints can't be written into {self.address}: {error.strerror or error}; "
                "choose another folder"
            ) from error
        # On the way to an address, each part is in the local folder for a while.
        count, text = (1, "a checkpoint") if self.remote is not None else (2, "two checkpoints")
        if free < expected_bytes or free + self.local.nbytes() < count * expected_bytes:
            raise ValueError(
                f"{text} of {expected_bytes / 1e9:.2f} GB don't fit into {self.folder}, "
                f"where {free / 1e9:.2f} GB are free; make room or choose another folder"
            )

    def join(self, rank: int, ranks: int, folder: Path, run: str) -> None:
        """From now on each save consists of the parts of all ranks, which all call ``save``.

        Args:
            folder: that of the first rank; if checkpoints are at an address, that of the first
                rank on this host, for fetched files.
            run: digits that are the same on all ranks, and of this run alone.
        """
        self.rank, self.ranks, self._run, self._fetched = rank, ranks, run, folder
        if self.remote is None:
            self.storage = self.local = Folder(folder, self.local.disk)
            self.folder = folder

    def takes(self, step: int) -> bool:
        """Returns False if the step is saved already, and undamaged, or can't be saved now."""
        try:
            return not self.storage.holds(name_of(step), self._on_damaged)
        except OSError as error:
            self._report(error)
            return False

    def wait(self) -> None:
        """Waits for an earlier save, so that the next one can begin at once."""
        began = time.perf_counter()
        self.writer.wait()
        self.alarm(self._slowness.due_warning(time.perf_counter() - began))
        self.look()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        positions: Mapping[str, ChunkPosition] | None = None,
        later: Collection[str] = (),
    ) -> None:
        """Write the state as it is now; returns once it is copied aside.

        Args:
            tensors: what this rank writes.
            meta: JSON; its entry ``ranks`` holds that of this rank alone.
            positions: positions of tensors that are chunks.
            later: names of tensors that the caller doesn't change before ``wait_for_copies`` has
                returned. Those in host memory are copied in the writer's thread.

        Raises:
            TypeError, ValueError: a save before this one held what can't be written.
        """
        self.wait()
        self._attempts += 1
        name = name_of(step)
        undone = f".writing-{name}-{self._run}-{self._attempts}"
        life = SignOfLife(self.storage.at(undone), self.rank, alone=self.ranks == 1)
        late = LateCopies(
            self._late_staging,
            {n: tensors[n] for n in later if self.asynchronous and tensors[n].device.type == "cpu"},
        )
        now = {name: tensor for name, tensor in tensors.items() if name not in late.tensors}
        try:
            staged = self._staging.take(now) if self.asynchronous else on_host(now)
        except BaseException as error:
            life.fail(_why(error))
            raise
        part = Part(self.rank, staged, positions or {}, (meta.get("ranks") or [{}])[0])
        common = {key: value for key, value in meta.items() if key != "ranks"}
        self._copied = late.done
        self.writer.start(partial(self._write, step, undone, part, common, life, late))
        if not self.asynchronous:
            self.wait_for_writer()

    def wait_for_copies(self) -> None:
        """Waits until all tensors of the last save may be changed."""
        self._copied.wait()

    def look(self) -> None:
        """Warns of the writer's error or of a slow place; raises an error that a state caused."""
        self._report(self.writer.error())
        if not self.writer.busy:
            self.alarm(self._slowness.due_warning())

    def wait_for_writer(self) -> None:
        """Until nothing is under way; its error is seen."""
        self.writer.wait()
        self.look()

    def close(self) -> None:
        """Until the last save is on the disk; the folder is free for others then."""
        try:
            self.wait_for_writer()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def paths(self) -> list[Path]:
        """Returns the checkpoints, oldest first; at an address, where each would be fetched."""
        with self._readable():
            return [self.folder / name for name in self.storage.names()]

    def read(self, path: Path, share: tuple[int, int] = (0, 1)) -> Found:
        """Returns a checkpoint of which this rank has compared its share of the files.

        Raises as ``sound``, and ValueError if the address can't be read.
        """
        if self.remote is not None and not path.exists():
            with self._readable():
                return self.remote.fetched(path.name, self._fetched, share)
        return *opened(path, verify(path, share=share), share[0]), path

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"checkpoints at {self.address} can't be read: {error}") from error

    def set_aside(self, path: Path, reason: str) -> None:
        """Moves a damaged checkpoint out of the way, as far as the place allows it."""
        with contextlib.suppress(OSError):
            self.storage.set_aside(path.name, "damaged", reason)
        self._on_damaged(path.name, reason)

    def discard_after(self, step: int) -> None:
        """Checkpoints after ``step`` are of a way not taken: they are set aside."""
        for name in self.storage.names():
            if step_of(name) > step:
                self.storage.set_aside(name, "aside")
                self.alarm(f"{name} is of steps after {step} and was set aside")

    def _write(
        self,
        step: int,
        undone: str,
        part: Part,
        meta: Mapping[str, Any],
        life: SignOfLife,
        late: LateCopies,
    ) -> None:
        try:
            part = replace(part, tensors={**part.tensors, **late.take()})
            if self.ranks > 1 or self.takes(step):
                self._pack_and_write(step, undone, part, meta, life)
        except BaseException as error:
            life.fail(_why(error))
            raise
        finally:  # the local folder must not fill up
            with contextlib.suppress(OSError):
                if self.remote is not None:
                    self.local.sweep(self._run)
                if not self.rank:
                    self.storage.sweep(self._run)

    def _pack_and_write(
        self, step: int, undone: str, part: Part, meta: Mapping[str, Any], life: SignOfLife
    ) -> None:
        """Writes this rank's part; the first rank commits when all parts are there."""
        began = time.perf_counter()
        # Staged tensors are overwritten by the next save anyway.
        part = replace(part, packed=self.packing.encode(part.tensors, in_place=self.asynchronous))
        packed = time.perf_counter()
        temporary, board = self.local.at(undone), self.storage.at(undone)
        temporary.open()
        write_part(temporary.path, part, temporary.disk)
        self.storage.publish(name_of(step), temporary.path, self.rank, life.stop)
        total_bytes = sum(tensor.nbytes for tensor in part.tensors.values())
        self.packing.speed = total_bytes / max(time.perf_counter() - packed, 1e-9)
        if not self.rank:
            wait_for_parts(board, self.ranks)
            manifest = manifest_of(board.read, self.ranks, step, meta)
            self.storage.commit(manifest, temporary.path)
            size = sum(file["bytes"] for file in manifest["files"].values())
            self._slowness.last = size, time.perf_counter() - began
            self.storage.prune(self.keep, self._on_damaged)
        self.writing_seconds = time.perf_counter() - began

    def _on_damaged(self, name: str, reason: str) -> None:
        self.alarm(f"{name} is damaged, was set aside, and the one before is used: {reason}")

    def _report(self, error: BaseException | None) -> None:
        if isinstance(error, OSError | MemoryError | DamagedCheckpointError):
            self.alarm(
                f"no checkpoint could be written to {self.address}: {_why(error)}; "
                "training continues, and the earlier checkpoints are unchanged"
            )
        elif error is not None:
            raise error

    def alarm(self, text: str) -> None:
        """Stores a problem that doesn't end the run, and warns of it; nothing without a text."""
        if text:
            self.alarms.append(text)
            warnings.warn(text, stacklevel=2)


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or "out of memory"
