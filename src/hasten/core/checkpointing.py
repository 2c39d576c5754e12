"""What a run asks of CHECKPOINT, and the default: state stays in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hasten.core.session import Session


class Checkpointing(Protocol):
    """CHECKPOINT: called between two steps, never inside one."""

    def after_step(self, session: Session) -> None:
        """A step is done."""

    def after_epoch(self, session: Session) -> None:
        """An epoch is done, after its last step."""

    def resume(self, session: Session) -> Path | None:
        """Bring a fresh session to the newest saved state; its path, or None without one."""


class NoCheckpoint:
    """State stays in memory."""

    def after_step(self, session: Session) -> None:
        return None

    def after_epoch(self, session: Session) -> None:
        return None

    def resume(self, session: Session) -> Path | None:
        return None
