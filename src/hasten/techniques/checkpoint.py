"""CHECKPOINT: when and how state is written to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from hasten.core.setup import Session, Setup
from hasten.core.slot import Slot
from hasten.core.state import gather_objects, restore, state_of
from hasten.core.technique import EffectCheck, Fidelity, Technique, setting
from hasten.errors import InputError, as_input_error
from hasten.parts.checkpoint import SmartCheckpointer
from hasten.parts.checkpoint.smart_checkpointer import Agree
from hasten.parts.checkpoint.state import FrozenWeights, moments_to_come
from hasten.parts.optim.compact_adamw import CompactAdamW

DYNAMIC, EPOCH = "dynamic", "epoch"


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

    def keeper(self, folder: Path | None, agree: Agree | None = None) -> SmartCheckpointer:
        """Returns a checkpointer with these settings, in ``folder`` if they name none."""
        each = self.interval if isinstance(self.interval, int) else DYNAMIC
        target = self.folder or str(folder)
        return SmartCheckpointer(each, self.max_checkpoints, self.compression, target, agree=agree)

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
        self.saved = 0  # started saves; failed ones are among the alarms
        self.resumed = ""  # name of the checkpoint that this process resumed from

    @cached_property
    def keeper(self) -> SmartCheckpointer:
        """Created at first use: it may connect to an address, and plans are read without a run."""
        return self._chosen.keeper(self._setup.folder, self._first_rank_says)

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
        """Starts to write the present state."""
        tensors, meta = state_of(session)  # on all ranks, because slots may gather their state
        self.keeper.save_state(session.progress.step, tensors, meta)
        self.saved += 1

    def resume(self, session: Session, path: Path | None = None) -> Path | None:
        """Resumes from the newest checkpoint that verifies, or from ``path``.

        Raises:
            InputError: the folder can't be used, or the checkpoint is damaged or of another run.
        """
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
        try:
            yield
            flag = torch.tensor([float(session.stop_requested)], dtype=torch.float64)
            stopped = bool(self._setup.layout.all_reduce_data(flag).item())  # a host tensor
            if stopped and self.keeper.step != session.progress.step:
                self.save(session)
        finally:
            self.keeper.close()

    def _open(self, session: Session) -> None:
        if isinstance(session.optimizer, CompactAdamW) and not self._setup.layout.replicated:
            raise InputError(
                "checkpoints: compact_adamw keeps moments in blocks of its own, which can't be "
                "joined across this layout's ranks; take another optimizer, or leave checkpoints "
                "out"
            )
        state = session.loss_module.state_dict(keep_vars=True)
        absent = session.frozen.names if session.frozen else ()
        tensors = [tensor for name, tensor in state.items() if name not in absent]
        # Tied weights count once; a sharded one has no memory of its own.
        weights = {t.data_ptr() or id(t): t.nbytes for t in tensors}
        local_bytes = sum(weights.values()) + moments_to_come(session.optimizer)
        # the first rank writes those of all stages
        expected = sum(gather_objects(session, local_bytes))
        with as_input_error("checkpoints"):
            self.keeper.open(expected)

    def _first_rank_says(self, numbers: Sequence[float]) -> Sequence[float]:
        main = self._setup.context.world.is_main
        values = torch.tensor(list(numbers), dtype=torch.float64)
        received: list[float] = self._setup.layout.all_reduce_world(values * float(main)).tolist()
        return received
