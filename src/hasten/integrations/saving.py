"""CHECKPOINT in another loop: model, optimizer and schedule on disk by hasten's checkpointer.

The data's position belongs to the host, so nothing is restored by itself: the checkpointer's own
``protect(...).restore()`` brings the state back where the reader wants it. A host that resumes from
its own checkpoints has all it needs in them but what a wire remembers, which is laid beside it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from hasten.core.setup import Setup
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.parts.checkpoint import SmartCheckpointer, checkpoints
from hasten.techniques.checkpoint import DYNAMIC, EPOCH, Checkpoints

WIRE_FILE = "hasten_wire.pt"


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
        if travels(self._setup):
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


def travels(setup: Setup) -> bool:
    """Whether there is a wire that may remember something."""
    return Slot.WIRE in setup.plan and setup.facts.world.size > 1


def keep_wire(setup: Setup, folder: Path) -> None:
    """What the wire has left out so far, into a host's checkpoint; every rank calls it."""
    if not travels(setup):
        return
    wire: Any = setup.wire
    found = wire.state_dict()  # brings all ranks' together on the first
    if setup.facts.world.is_main:
        unfinished = folder / f".{WIRE_FILE}.part"
        torch.save(found, unfinished)
        unfinished.replace(folder / WIRE_FILE)


def take_wire(setup: Setup, folder: Path) -> None:
    """The wire goes on from what the checkpoint in the folder says; every rank calls it.

    Raises:
        InputError: the checkpoint is of another wire.
    """
    if not travels(setup):
        return
    wire: Any = setup.wire
    if (folder / WIRE_FILE).is_file():
        wire.load_state_dict(torch.load(folder / WIRE_FILE, weights_only=True))
    else:
        warnings.warn(
            f"{folder} says nothing of the wire: it begins anew, with its dense start", stacklevel=2
        )
