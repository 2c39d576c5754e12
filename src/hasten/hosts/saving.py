"""CHECKPOINT in another loop: model, optimizer and schedule on disk by hasten's checkpointer.

The data's position belongs to the host, so nothing is restored by itself: the checkpointer's own
``protect(...).restore()`` brings the state back where the reader wants it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.parts.checkpoint import SmartCheckpointer, checkpoints
from hasten.techniques.checkpoint import DYNAMIC, EPOCH, Checkpoints


class Saves:
    """A technique's rhythm and folder, for as long as one training lasts."""

    def __init__(self, chosen: Checkpoints, setup: Setup) -> None:
        self._chosen, self._setup = chosen, setup
        self.folder = chosen.folder or str(setup.folder)
        self._keeper: SmartCheckpointer | None = None

    @classmethod
    def of(cls, setup: Setup) -> Saves | None:
        """None where the plan has no checkpoints.

        Raises:
            InputError: an earlier run's checkpoints are in the folder.
        """
        chosen = next((t for t in setup.plan if isinstance(t, Checkpoints)), None)
        if chosen is None:
            return None
        saves = cls(chosen, setup)
        if "://" not in saves.folder and checkpoints(Path(saves.folder)):
            raise InputError(
                f"{saves.folder} holds checkpoints of an earlier run; give checkpoints another "
                "folder, or move them away"
            )
        return saves

    def begin(self, **objects: Any) -> None:
        """Training begins with these; a wire that remembers is saved with them."""
        each = self._chosen.interval if isinstance(self._chosen.interval, int) else DYNAMIC
        keeper = SmartCheckpointer(
            each, self._chosen.max_checkpoints, self._chosen.compression, self.folder
        )
        if Slot.WIRE in self._setup.plan and self._setup.facts.world.size > 1:
            objects["wire"] = self._setup.wire
        self._keeper = keeper.protect(**objects)

    def after_step(self, step: int) -> None:
        if self._keeper is None:
            return
        if self._chosen.interval == EPOCH:
            self._keeper.saver.look()
        else:
            self._keeper.after_step(step)

    def after_epoch(self, step: int) -> None:
        if self._keeper is not None and self._chosen.interval == EPOCH:
            self._keeper.save(step)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
