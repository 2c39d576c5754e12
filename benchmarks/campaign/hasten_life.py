"""A run under hasten: the kit's own loop, with a disk that kills or forgets at any of its calls."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import fault_kit
from fault_kit import DeadlyDisk, Tell, VolatileDisk
from hasten.parts.checkpoint import checkpoints

CALLS = 90  # of the disk, within the opening and the first three saves of a life
CALLS_OF_A_RUN = 300


class Hasten:
    """``SmartCheckpointer`` in a plain loop."""

    steps = 120

    def train(self, folder: Path, steps: int, tell: Tell, poison: int | None = None) -> None:
        """Poison is for those that have no other way to get it (``own.nans``)."""
        assert poison is None
        fault_kit.train(folder, steps, tell)

    def train_and_die(self, folder: Path, steps: int, tell: Tell, draw: random.Random) -> None:
        """SIGKILL at one of the calls that a save makes."""
        disk = DeadlyDisk(draw.randint(1, CALLS))
        fault_kit.train(folder, steps, tell, disk, asynchronous=draw.random() < 0.5)

    def train_until_dark(
        self, root: Path, run: str, left: Path, tell: Tell, draw: random.Random
    ) -> None:
        """The power goes at one of the calls; ``left`` is what the disk then has of ``root``."""
        call, ahead = draw.randint(1, CALLS_OF_A_RUN), draw.random() < 0.5
        dark = threading.Lock()  # never given back: it goes out once, whichever thread comes first

        def go_out() -> None:
            dark.acquire()
            code = 1
            try:
                disk.left(left, ahead)
                code = 0
            except Exception as error:
                tell(f"E {error!r}")
            finally:
                os._exit(code)

        def cut(place: str) -> None:
            if disk.calls == call:
                go_out()

        disk = VolatileDisk(root, cut)
        fault_kit.train(root / run, self.steps, tell, disk, asynchronous=draw.random() < 0.5)
        go_out()

    def newest(self, folder: Path) -> list[Path]:
        """The files of the newest checkpoint."""
        return sorted(checkpoints(folder)[-1].iterdir())


TRAINER = Hasten()
