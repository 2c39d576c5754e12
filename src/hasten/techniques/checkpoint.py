"""CHECKPOINT: when and how state is written to disk."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.core.layout import KeepsState, SplitsModel, rank_rows
from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.state import CHUNKED, MASTER, MODEL, OPTIMIZER, restore, state_of
from hasten.core.technique import EffectCheck, Fidelity, Technique, setting
from hasten.errors import InputError, as_input_error
from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.checkpoint.chunks import ChunkPlan
from hasten.parts.checkpoint.commit import Folder
from hasten.parts.checkpoint.ranks import Storage
from hasten.parts.checkpoint.smart_checkpointer import OfRanks
from hasten.parts.checkpoint.state import FrozenWeights, moments_to_come, of_all_ranks
from hasten.parts.optim.compact_adamw import CompactAdamW

DYNAMIC, EPOCH = "dynamic", "epoch"
SEEN_WITHIN = 5.0  # seconds in which a new file must be visible to all hosts


@dataclass(frozen=True)
class Checkpoints(Technique):
    """Saves the full state as often as it is worthwhile; one rename commits each checkpoint."""

    slot = Slot.CHECKPOINT
    fidelity = Fidelity.EXACT
    interval: str | int = setting(
        DYNAMIC, "dynamic: from what saves cost; a number of steps; epoch: at each one's end"
    )
    max_checkpoints: int = setting(3, "verified checkpoints that stay", least=1)
    compression: bool = setting(True, "pack them, where a measurement shows that it pays")
    folder: str | None = setting(
        None, "a path, or an address of fsspec; default: the run's own folder"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = type(self.interval) is int and self.interval >= 1
        if not (steps or self.interval in (DYNAMIC, EPOCH)):
            raise ValueError(
                f"interval is {self.interval!r}; give dynamic, epoch, or a number of steps"
            )

    def apply(self, setup: Setup) -> None:
        if self.folder is None and setup.folder is None:
            raise InputError("checkpoints need a run folder: give output (or checkpoint_dir)")
        setup.checkpoint = SessionCheckpoints(self, setup)

    def keeper(self, folder: Path | None, of_ranks: OfRanks | None = None) -> SmartCheckpointer:
        """Returns a checkpointer with these settings, in ``folder`` if they name none."""
        each = self.interval if isinstance(self.interval, int) else DYNAMIC
        target = self.folder or str(folder)
        settings = (each, self.max_checkpoints, self.compression, target)
        return SmartCheckpointer(*settings, of_ranks=of_ranks)

    def check_effect(self, session: Session) -> EffectCheck:
        checkpoints = session.setup.checkpoint
        if not isinstance(checkpoints, SessionCheckpoints):
            return EffectCheck(False, "0 checkpoint(s) written")
        keeper = checkpoints.keeper
        evidence = [
            *([f"resumed from {checkpoints.resumed}"] if checkpoints.resumed else []),
            f"{checkpoints.saved} checkpoint(s) written",
            keeper.compression,
            *keeper.alarms[-1:],
        ]
        effective = checkpoints.saved > 0 or bool(checkpoints.resumed)
        return EffectCheck(effective, "; ".join(evidence))


class SessionCheckpoints:
    """Saves a session's state when it is due, and restores a saved one."""

    def __init__(self, chosen: Checkpoints, setup: Setup) -> None:
        self._chosen, self._setup = chosen, setup
        self._plan = ChunkPlan(setup.context.world.size)
        self._waits = False  # True while each update waits for copies
        self.saved = 0  # started saves; failed ones are among the alarms
        self.resumed = ""  # name of the checkpoint that this process resumed from

    @cached_property
    def keeper(self) -> SmartCheckpointer:
        """Created at first use: it may connect to an address, and plans are read without a run."""
        return self._chosen.keeper(self._setup.folder, self._of_ranks)

    @property
    def _size(self) -> int:
        return self._setup.context.world.size

    def _of_ranks(self, local_object: Any) -> list[Any]:
        # A session of one process may run inside a process that belongs to a larger group.
        return [local_object] if self._size == 1 else of_all_ranks(local_object)

    def frozen(self, model: nn.Module, prefix: str) -> FrozenWeights:
        return FrozenWeights(model, prefix)

    def after_step(self, session: Session) -> None:
        if self._chosen.interval == EPOCH:
            self.keeper.saver.look()
        elif self.keeper.due(session.progress.step):
            self.save(session)

    def after_epoch(self, session: Session) -> None:
        if self._chosen.interval == EPOCH:
            self.save(session)

    def save(self, session: Session) -> None:
        """Starts to write the present state.

        Ranks exchange messages here, on the main thread: if a save can begin, and the plan of
        chunks if it changed. They exchange none while they write. The cost for ``dynamic`` is the
        time of the slowest rank, with its waits for earlier saves and other ranks.
        """
        began, step = time.perf_counter(), session.progress.step
        self.keeper.saver.wait()
        tensors, meta = state_of(session)
        shared = {name: tensor for name, tensor in tensors.items() if name.startswith(CHUNKED)}
        saver, first = self.keeper.saver, self._setup.context.world.is_main
        # One rank alone looks for an earlier save of this step in its thread.
        refused = first and not (self.keeper.ready() and (self._size == 1 or saver.takes(step)))
        flags = torch.tensor([float(refused), float(self._plan.changed(shared))]).double()
        none, changed = self._setup.layout.all_reduce_world(flags).tolist()
        if changed and not none:
            with as_input_error("checkpoints"):
                self._plan.exchange(shared)
        if none:
            self.keeper.passed(step)
        else:
            chunks, positions = self._plan.chunks_of(shared)
            chunks |= {name: tensor for name, tensor in tensors.items() if name not in shared}
            self.keeper.save_state(step, chunks, meta, positions, self._later(session, chunks))
        seconds = rank_rows(
            self._setup.layout, self._setup.context.world, time.perf_counter() - began
        )
        self.keeper.interval.blocked.append(float(seconds.max()))
        self.saved += 1

    def _later(self, session: Session, tensors: dict[str, Tensor]) -> list[str]:
        """Returns the names of tensors that only the optimizer's step changes.

        They are copied during the next forward and backward pass. With a running average
        there are none: an evaluation puts the means in the weights' place.
        """
        if session.setup.average is not None or not self._waits:
            return []
        buffers = {f"{MODEL}/{name}" for name, _ in session.loss_module.named_buffers()}
        kinds = (f"{MODEL}/", f"{MASTER}/", f"{OPTIMIZER}/")
        return [name for name in tensors if name.startswith(kinds) and name not in buffers]

    def _before_update(self, *_: Any) -> None:
        """Waits until the weights are copied; the wait is part of the save's cost."""
        began = time.perf_counter()
        self.keeper.saver.wait_for_copies()
        if self.keeper.interval.blocked:
            self.keeper.interval.blocked[-1] += time.perf_counter() - began

    def resume(self, session: Session, path: Path | None = None) -> Path | None:
        """Resumes from the newest checkpoint that verifies, or from ``path``.

        Raises:
            InputError: the folder can't be used, or the checkpoint is damaged or of another run.
        """
        self.keeper.saver.wait_for_copies()
        self._open(session)
        try:
            with as_input_error("checkpoints"):
                loaded = self.keeper.load_state(path)
                if loaded is None:
                    return None
                tensors, meta, folder = loaded
                restore(session, tensors, meta)
        except InputError:
            self.keeper.close()  # the caller may catch it and start again in this folder
            raise
        self.resumed = folder.name
        return folder

    def wait_for_writer(self) -> None:
        self.keeper.saver.wait_for_writer()

    @contextlib.contextmanager
    def running(self, session: Session) -> Iterator[None]:
        """Context around all steps; if any rank received a stop request, all ranks save."""
        self._open(session)
        hook = session.optimizer.register_step_pre_hook(self._before_update)
        self._waits = True
        try:
            yield
            flag = torch.tensor([float(session.stop_requested)], dtype=torch.float64)
            stopped = bool(self._setup.layout.all_reduce_data(flag).item())  # a host tensor
            if stopped and self.keeper.step != session.progress.step:
                self.save(session)
        finally:
            self._waits = False
            hook.remove()
            self.keeper.close()

    def _open(self, session: Session) -> None:
        if isinstance(session.optimizer, CompactAdamW) and not self._setup.layout.replicated:
            raise InputError(
                "checkpoints: compact_adamw keeps moments in blocks of its own, which can't be "
                "joined across this layout's ranks; take another optimizer, or leave checkpoints "
                "out"
            )
        stages = dict(self._of_ranks((self._setup.layout.stage, bytes_of_stage(session))))
        # To an address, the disk of this host holds the parts of its own ranks on their way.
        shares = self._size if self.keeper.saver.remote is not None else 1
        with as_input_error("checkpoints"):
            self.keeper.together(partial(self.keeper.open, sum(stages.values()) // shares))
        if self._size > 1 and self.keeper.saver.ranks == 1:
            self._join()

    def _join(self) -> None:
        """Makes the ranks write to one place: the first one's folder, or the address."""
        saver, world = self.keeper.saver, self._setup.context.world
        folders, runs = zip(
            *self._of_ranks((saver.folder.absolute(), str(secrets.randbits(40)))), strict=True
        )
        mark, remote = f".run-{runs[0]}", saver.remote
        board: Storage = Folder(folders[0]) if remote is None else remote
        if remote is not None:
            (saver.folder / mark).touch()
        try:
            self.keeper.together(partial(check_shared, board, mark, world.rank))
        finally:
            if world.is_main:
                with contextlib.suppress(OSError):
                    board.remove(mark)
        # Ranks of one host fetch each file once.
        shared = [folder for folder in folders if remote is None or sees(folder / mark)]
        saver.join(world.rank, world.size, shared[0], runs[0])


def bytes_of_stage(session: Session) -> int:
    """Returns the estimated size of a checkpoint of this rank's layers, over all their ranks."""
    layout = session.setup.layout
    absent = session.frozen.names if session.frozen else ()

    def full_size(weight: Tensor) -> int:
        if isinstance(layout, SplitsModel | KeepsState):
            weight = layout.placed(weight, weight)
        return int(weight.nbytes)

    state = session.loss_module.state_dict(keep_vars=True)
    # Tied weights count once; a sharded one has no memory of its own.
    weights = {t.data_ptr() or id(t): t for name, t in state.items() if name not in absent}
    if isinstance(layout, KeepsState):  # AdamW's two moments are of flat tensors
        moments = 2 * sum(full_size(t) for t in weights.values() if t.requires_grad)
    else:
        moments = moments_to_come(session.optimizer, full_size)
    return sum(map(full_size, weights.values())) + moments


def sees(path: Path) -> bool:
    """Returns True if a file of another rank is on this host."""
    return path.exists()


def check_shared(board: Storage, mark: str, rank: int) -> None:
    """Writes a file next to ``mark``, which the first rank writes; all ranks call it.

    Raises:
        InputError: the file isn't there, or none can be written.
    """
    test_file = f"{mark}-{rank}"
    deadline = time.monotonic() + SEEN_WITHIN
    try:
        if not rank:
            board.open()
            board.put(mark, b"")
        while mark not in board.look():
            if time.monotonic() > deadline:
                raise FileNotFoundError(f"the first rank's file {mark} isn't there")
            time.sleep(0.05)
        board.put(test_file, b"")
        board.remove(test_file)
    except OSError as error:
        raise InputError(
            f"checkpoints: rank {rank} on {socket.gethostname()} can't use {board.label} together "
            f"with the first rank ({error.strerror or error}); each rank writes its part there, "
            "so give a folder that all hosts see and can write, or an address that all reach"
        ) from error
