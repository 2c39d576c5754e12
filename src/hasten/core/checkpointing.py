"""What a run asks of CHECKPOINT, and the default: state stays in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from hasten.errors import InputError


class Checkpointing(Protocol):
    """CHECKPOINT: called between two steps, never inside one."""

    def after_step(self, session: Any) -> None:
        """A step is done."""

    def after_epoch(self, session: Any) -> None:
        """An epoch is done, after its last step."""

    def resume(self, session: Any, path: Path | None = None) -> Path | None:
        """Bring a fresh session to the newest saved state, or to that of ``path``; its path, or
        None without one."""

    def settle(self) -> None:
        """Until nothing is under way, before another process is measured on this machine."""

    def running(self, session: Any) -> AbstractContextManager[None]:
        """Around all steps: what can't be written is refused before them, and what is under way
        is done after them. A run that was asked to stop is saved."""


class NoCheckpoint:
    """State stays in memory."""

    def after_step(self, session: Any) -> None:
        return None

    def after_epoch(self, session: Any) -> None:
        return None

    def resume(self, session: Any, path: Path | None = None) -> Path | None:
        if path is not None:
            raise InputError(
                f"resume: {path} needs checkpoints in the plan, or checkpoint_every, to be read"
            )
        return None

    def settle(self) -> None:
        return None

    def running(self, session: Any) -> AbstractContextManager[None]:
        return nullcontext()
