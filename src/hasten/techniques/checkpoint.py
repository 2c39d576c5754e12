"""CHECKPOINT: when and how state reaches the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hasten.core.session import Session
from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.core.state import restore, state_of
from hasten.core.technique import Fidelity, Proof, Technique, knob
from hasten.errors import InputError
from hasten.parts import checkpoint


@dataclass(frozen=True)
class Checkpoints(Technique):
    """The whole state every so many steps, each checkpoint committed by one rename."""

    slot = Slot.CHECKPOINT
    every_steps: int = knob(100, "steps between two checkpoints; 0: at the end of each epoch")
    keep: int = knob(2, "checkpoints kept", low=1, high=10)

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.keep < 1:
            raise ValueError("every_steps can't be negative, and at least 1 checkpoint is kept")

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT

    def apply(self, setup: Setup) -> None:
        if setup.folder is None:
            raise InputError("checkpoints need a run folder: give output (or checkpoint_dir)")
        setup.checkpoint = SessionCheckpoints(setup.folder, self.every_steps, self.keep)

    def probe(self, session: Session) -> Proof:
        keeper = session.setup.checkpoint
        saved = keeper.saved if isinstance(keeper, SessionCheckpoints) else 0
        return Proof(saved > 0, f"{saved} checkpoint(s) written")


class SessionCheckpoints:
    """Writes a session's state when it is due, on the main rank; reads it on all."""

    def __init__(self, folder: Path, every_steps: int, keep: int) -> None:
        self.folder, self.every_steps, self.keep = folder, every_steps, keep
        self.saved = 0

    def after_step(self, session: Session) -> None:
        if self.every_steps and session.progress.step % self.every_steps == 0:
            self.save(session)

    def after_epoch(self, session: Session) -> None:
        if not self.every_steps:
            self.save(session)

    def save(self, session: Session) -> None:
        """Write the state now."""
        tensors, meta = state_of(session)  # on all ranks: what a slot remembers may be gathered
        if session.setup.facts.world.is_main:
            checkpoint.save(self.folder, session.progress.step, tensors, meta)
            checkpoint.prune(self.folder, self.keep)
        self.saved += 1

    def resume(self, session: Session) -> Path | None:
        """Go on from the newest checkpoint that verifies; None, and a fresh start, without one."""
        found = checkpoint.load_latest(self.folder)
        if found is None:
            return None
        tensors, meta, path = found
        restore(session, tensors, meta)
        return path
