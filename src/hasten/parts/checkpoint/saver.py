"""Saves named tensors and JSON to a folder and back, with its lock, space and thread.

- save: copy to host memory (blocks) | copy the rest, before it changes -> pack -> write -> send
  to an address -> commit -> verify, prune (in the writer's thread)
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.errors import require_whole
from hasten.machine import host
from hasten.machine.locks import HeldLock
from hasten.parts.checkpoint.chunks import ChunkPosition
from hasten.parts.checkpoint.commit import (
    LOCAL,
    Known,
    Part,
    commit,
    exists_whole,
    force_names,
    only_writer,
    opened,
    paths_of,
    prune,
    save,
    stands,
    sweep,
    verify,
    write_part,
)
from hasten.parts.checkpoint.format import (
    DESCRIPTION,
    MANIFEST,
    CompressionChoice,
    DamagedCheckpointError,
    Disk,
    archive,
    bytes_in,
    checkpoints,
    choose,
    encode,
    on_host,
    part_name,
    quarantine,
)
from hasten.parts.checkpoint.ranks import (
    Board,
    FolderBoard,
    SignOfLife,
    report_failure,
    wait_for_parts,
)
from hasten.parts.checkpoint.remote import Address, is_address

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
    """Tensors that are copied by another thread, while none of them changes.

    Args:
        done: set as soon as they may change.
    """

    def __init__(self, staging: Staging, tensors: Mapping[str, Tensor]) -> None:
        self._staging, self._tensors = staging, tensors
        self._versions = self._now()
        self.done = threading.Event()

    def take(self) -> dict[str, Tensor]:
        """Returns the copies.

        Raises:
            OSError: a tensor was changed meanwhile.
        """
        try:
            copies = self._staging.take(self._tensors)
            if self._now() != self._versions:
                raise OSError("weights were changed while they were copied")
            return copies
        finally:
            self.done.set()

    def _now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors.values()]  # each write raises it


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


# Says, with its MB/s, that a place takes checkpoints slowly; once, and again where it got worse.
#
# A slow place costs nothing as long as the writer's thread keeps up with it. It has to be known
# where training waits for that thread, or where a write takes so long that much is lost between
# two.

WAITED = 1.0  # seconds that training may wait for an earlier save in silence
LONG, SLOW = 10.0, 50e6  # seconds of a write, and bytes per second: below any disk, or 0.4 Gbit/s


class Slowness:
    """Measured speed of one target.

    Args:
        address: a folder or an address, as the user wrote it.
    """

    def __init__(self, address: str) -> None:
        self._place = address
        self._last = (0, 0.0)  # bytes and seconds of the last write
        self._warned_speed = math.inf  # bytes per second at the last warning

    def wrote(self, size: int, seconds: float) -> None:
        """A checkpoint of so many bytes has reached the place; any thread may call it."""
        self._last = (size, seconds)

    def due_warning(self, waited: float = 0.0) -> str:
        """Returns a warning if one is due, else an empty text.

        Args:
            waited: seconds that training has just waited for the write.
        """
        size, seconds = self._last
        if not size or seconds <= 0:
            return ""
        speed = size / seconds
        slow = (seconds >= LONG and speed < SLOW) or waited >= WAITED
        if not slow or speed > self._warned_speed / 2:
            return ""
        self._warned_speed = speed
        waiting = f", and training waited {waited:.1f} s for it" if waited >= WAITED else ""
        return (
            f"{self._place} is slow: a checkpoint of {size / 1e6:,.1f} MB took {seconds:.1f} s, "
            f"{speed / 1e6:,.1f} MB/s{waiting}; save less often, or to a faster folder"
        )


SHUFFLE = "shuffle"
Found = tuple[Mapping[str, Tensor], dict[str, Any], Path]  # tensors, meta, the checkpoint


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
        if compression not in (True, False, SHUFFLE):
            raise ValueError(f"compression is {compression!r}; give True or False")
        self.address = str(folder)
        self.remote = Address(self.address) if is_address(self.address) else None
        if self.remote is not None:
            folder = tempfile.mkdtemp(prefix="hasten-checkpoints-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = self._fetched = Path(folder)
        self.keep, self.compression, self.asynchronous = keep, compression, asynchronous
        self.choice = _set_choice(compression)
        self.alarms: list[str] = []
        self.saved = 0  # committed by this object
        self.writing_seconds = 0.0
        self._disk = disk
        self._lock: HeldLock | None = None
        self._staging, self._late_staging = Staging(), Staging()
        self._writer, self._copied = CheckpointWriter(), threading.Event()
        self._copied.set()  # nothing is under way
        self._slowness = Slowness(self.address)
        self._known: Known = {}
        self.rank, self.ranks = 0, 1  # this one, and all that write parts
        self._run, self._attempts = str(os.getpid()), 0
        self._plain_speed = 0.0  # bytes per second of the first save, which isn't packed

    def open(self, expected_bytes: int = 0) -> None:
        """Take the folder, before anything is trained; again, it changes nothing.

        Raises:
            FolderInUseError: another run writes into it.
            ValueError: it can't be written, or two checkpoints of ``expected_bytes`` don't fit.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                if self.remote is not None:
                    self.remote.sweep()
                self._lock = only_writer(self.folder)
                sweep(self.folder)  # it takes room that is looked for below
            force_names(self.folder, self._disk)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise ValueError(
                f"checkpoints can't be written into {self.address}: {error.strerror or error}; "
                "choose another folder"
            ) from error
        used_bytes = bytes_in(self.folder)
        # On the way to an address, each part is in the local folder for a while.
        count, text = (1, "a checkpoint") if self.remote is not None else (2, "two checkpoints")
        if free < expected_bytes or free + used_bytes < count * expected_bytes:
            raise ValueError(
                f"{text} of {expected_bytes / 1e9:.2f} GB don't fit into {self.folder}, "
                f"where {free / 1e9:.2f} GB are free; make room or choose another folder"
            )

    @property
    def is_open(self) -> bool:
        """Returns True if this process holds the folder."""
        return self._lock is not None

    @property
    def busy(self) -> bool:
        """Returns True if a save is running."""
        return self._writer.busy

    def join(self, rank: int, ranks: int, folder: Path, run: str) -> None:
        """From now on each save consists of the parts of all ranks, which all call ``save``.

        Args:
            folder: that of the first rank; if checkpoints are at an address, that of the first
                rank on this host, for fetched files.
            run: digits that are the same on all ranks, and of this run alone.
        """
        self.rank, self.ranks, self._run, self._fetched = rank, ranks, run, folder
        if self.remote is None:
            self.folder = folder

    def takes(self, step: int) -> bool:
        """Returns False if the step is saved already, and undamaged, or can't be saved now."""
        path = self.path_of(step)
        if self.remote is None:
            return not exists_whole(path)
        try:
            return MANIFEST not in self.remote.sizes(path.name)
        except OSError as error:
            self._report(error)
            return False

    def wait(self) -> None:
        """Waits for an earlier save, so that the next one can begin at once."""
        began = time.perf_counter()
        self._writer.wait()
        self._alarm_if(self._slowness.due_warning(time.perf_counter() - began))
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
        life = SignOfLife(self._board(step), self.rank) if self.ranks > 1 else None
        steady = {name: tensors[name] for name in later if tensors[name].device.type == "cpu"}
        now = {name: tensor for name, tensor in tensors.items() if name not in steady}
        try:
            staged = (
                self._staging.take(now)
                if self.asynchronous
                else {name: on_host(name, tensor) for name, tensor in tensors.items()}
            )
        except BaseException:
            if life is not None:
                life.stop()
            raise
        part = Part(self.rank, staged, positions or {}, meta=(meta.get("ranks") or [{}])[0])
        common = {key: value for key, value in meta.items() if key != "ranks"}
        if self.asynchronous:
            late = LateCopies(self._late_staging, steady)
            self._copied = late.done
            self._writer.start(lambda: self._write(step, part, common, life, late))
            return
        try:
            self._write(step, part, common, life)
        except (OSError, MemoryError) as error:
            self._report(error)

    def wait_for_copies(self) -> None:
        """Waits until all tensors of the last save may be changed."""
        self._copied.wait()

    def look(self) -> None:
        """See the writer's error: a warning where the disk is at fault, raised where a state is.

        A place that is too slow is a warning as well.
        """
        self._report(self._writer.error())
        if not self.busy:
            self._alarm_if(self._slowness.due_warning())

    def wait_for_writer(self) -> None:
        """Until nothing is under way; its error is seen."""
        self._writer.wait()
        self.look()

    def close(self) -> None:
        """Until the last save is on the disk; the folder is free for others then."""
        try:
            self.wait_for_writer()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def newest(self) -> int | None:
        """Returns the step of the newest checkpoint; None without one.

        Raises:
            ValueError: the address can't be read.
        """
        self._writer.wait()
        paths = self.paths()
        return int(paths[-1].name.removeprefix("step-")) if paths else None

    def paths(self) -> list[Path]:
        """Returns the checkpoints, oldest first; at an address, where each would be fetched."""
        if self.remote is None:
            return checkpoints(self.folder)
        with self._readable():
            return [self.folder / name for name in self.remote.names()]

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def read(self, path: Path, share: tuple[int, int] = (0, 1)) -> Found:
        """Returns a checkpoint of which this rank has compared its share of the files.

        Raises:
            DamagedCheckpointError: it isn't as it was written.
            ValueError: the address can't be read.
        """
        if self.remote is not None and not path.exists():
            with self._readable():
                return self.remote.read(path.name, self._fetched, share)
        return *opened(path, verify(path, share=share), share[0]), path

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(f"checkpoints at {self.address} can't be read: {error}") from error

    def set_aside(self, path: Path, reason: str) -> None:
        """Moves a damaged checkpoint out of the way; the one before it becomes the newest."""
        if self.remote is not None:
            self.remote.move_manifest(path.name, "damaged")
        else:
            quarantine(path, reason)
        self._on_damaged(path, reason)

    def discard_after(self, step: int) -> None:
        """Checkpoints after ``step`` are of a way not taken: they are set aside."""
        if self.remote is not None:
            names = self.remote.archive(step)
        else:
            names = [path.name for path in archive(self.folder, step)]
        for name in names:
            self.alarm(f"{name} is of steps after {step} and was set aside")

    def _paths(self, step: int) -> tuple[Path, Path]:
        return paths_of(self.folder, step, f"{self._run}-{self._attempts}")

    def _board(self, step: int) -> Board:
        temporary = self._paths(step)[1]
        return self.remote.board(temporary.name) if self.remote else FolderBoard(temporary)

    def _write(
        self,
        step: int,
        part: Part,
        meta: Mapping[str, Any],
        life: SignOfLife | None,
        late: LateCopies | None = None,
    ) -> None:
        stop: Callable[[], None] = (lambda: None) if life is None else life.stop
        try:
            if late is not None:
                part = replace(part, tensors={**part.tensors, **late.take()})
            self._pack_and_write(step, part, meta, stop)
        except BaseException as error:
            stop()
            if self.rank:
                reason = getattr(error, "strerror", None) or str(error)
                report_failure(self._board(step), self.rank, reason)
            raise
        finally:
            self._clear(step)

    def _clear(self, step: int) -> None:
        """Removes what a save leaves besides a checkpoint; the local folder must not fill up."""
        if self.remote is not None or not self.rank:
            self._disk.remove(self._paths(step)[1])
        if self.remote is not None and not self.rank:
            with contextlib.suppress(OSError):
                self.remote.sweep(self._run)

    def _pack_and_write(
        self, step: int, part: Part, meta: Mapping[str, Any], stop: Callable[[], None]
    ) -> None:
        began = time.perf_counter()
        if self.choice is None and self._plain_speed:  # the first save was plain, and timed
            self.choice = choose(part.tensors, self._plain_speed)
        chosen = time.perf_counter()
        total_bytes = sum(t.numel() * t.element_size() for t in part.tensors.values())
        part = self._packed(part)
        if self.ranks == 1 and self.remote is None:
            alone = {**meta, "ranks": [dict(part.meta)]}
            path = save(self.folder, step, part.tensors, alone, coded=part.coded, disk=self._disk)
            size = sum(file.stat().st_size for file in path.iterdir())
        elif self.ranks == 1 and not self.takes(step):
            return
        else:
            size = self._write_part(step, part, meta, stop)
        if not self.rank:
            taken = time.perf_counter() - chosen
            self._plain_speed = total_bytes / taken
            self._slowness.wrote(size, taken)
            self.saved += 1
            if self.remote is not None:
                self.remote.prune(self.keep)
            else:
                prune(self.folder, self.keep, self._known, self._on_damaged)
        self.writing_seconds = time.perf_counter() - began

    def _packed(self, part: Part) -> Part:
        if self.choice is None or not self.choice.packs:
            return part
        # Staged tensors are overwritten by the next save anyway.
        packed, coded = encode(part.tensors, in_place=self.asynchronous)
        return replace(part, tensors=packed, coded=coded)

    def _write_part(
        self, step: int, part: Part, meta: Mapping[str, Any], stop: Callable[[], None]
    ) -> int:
        """Writes this rank's part; the first rank commits when all parts are there.

        Args:
            stop: ends the signs of life.

        Returns:
            The bytes of the checkpoint on the first rank; 0 on others.
        """
        temporary, board, size = self._paths(step)[1], self._board(step), 0
        with contextlib.suppress(FileExistsError):
            self._disk.make_folder(temporary)
        began = time.perf_counter()
        if self.remote is None:
            write_part(temporary, part, self._disk, stop)
        else:
            self._send_part(self.remote, board, step, part, stop)
        taken = time.perf_counter() - began
        if not self.rank:
            wait_for_parts(board, self.ranks)
            size = self._commit(board, step, meta)
        elif taken:
            nbytes = sum(t.numel() * t.element_size() for t in part.tensors.values())
            self._plain_speed = nbytes / taken
        return size

    def _send_part(
        self, remote: Address, board: Board, step: int, part: Part, stop: Callable[[], None]
    ) -> None:
        final, temporary = self._paths(step)
        board.open()
        write_part(temporary, part, self._disk, lambda: None)
        remote.send_part(temporary, final.name, part.rank)
        stop()
        name = part_name(part.rank, DESCRIPTION)
        board.put(name, (temporary / name).read_bytes())

    def _commit(self, board: Board, step: int, meta: Mapping[str, Any]) -> int:
        """Makes a checkpoint of the parts that are there; returns its bytes."""
        final, temporary = self._paths(step)
        if self.remote is not None:
            return self.remote.commit(final.name, board, self.ranks, meta)
        commit(temporary, final, self.ranks, meta, self._disk)
        self._known[final.name] = stands(final)  # each rank has compared its own part
        return sum(file.stat().st_size for file in final.iterdir())

    def _on_damaged(self, path: Path, reason: str) -> None:
        self.alarm(f"{path.name} is damaged, was set aside, and the one before is used: {reason}")

    def _report(self, error: BaseException | None) -> None:
        if isinstance(error, OSError | MemoryError | DamagedCheckpointError):
            reason = getattr(error, "strerror", None) or str(error) or "out of memory"
            self.alarm(
                f"no checkpoint could be written to {self.address}: {reason}; "
                "training continues, and the earlier checkpoints are unchanged"
            )
        elif error is not None:
            raise error

    def _alarm_if(self, text: str) -> None:
        if text:
            self.alarm(text)

    def alarm(self, text: str) -> None:
        """Stores a problem that doesn't end the run, and warns of it."""
        self.alarms.append(text)
        warnings.warn(text, stacklevel=2)


def _set_choice(compression: bool | str) -> CompressionChoice | None:
    """Returns the choice that needs no measurement, if there is one."""
    if compression is True:
        return None
    kind = compression or "off"
    return CompressionChoice(compression == SHUFFLE, f"compression {kind}: set by the user")
