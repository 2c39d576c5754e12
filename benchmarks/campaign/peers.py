"""What is done to other trainers inside a run: nothing of theirs is changed, they are only watched.

They save in the step, so that a hook before and one after is enough: a timer that ends the process
inside a save, and a copy of what a disk would have if the power went after one.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fault_kit import VolatileDisk
from fault_kit import batch as batch_of_step

RECORDS = 40  # each a whole batch of the kit's loop
STEPS = 30


class Hook(Protocol):
    """Called around every save."""

    def before(self, step: int) -> None: ...

    def after(self, step: int) -> None: ...


class NoHook:
    """Nothing happens."""

    def before(self, step: int) -> None:
        return None

    def after(self, step: int) -> None:
        return None


class DiesInside:
    """Ends the process, as SIGKILL does, at a random instant of one of its saves.

    The kernel's timer does it (setitimer(2), SIGALRM without a handler): no thread has to be woken.
    How long a save takes at least is learnt from those before.
    """

    def __init__(self, draw: random.Random) -> None:
        self.save, self.share = draw.randint(3, 5), draw.random()
        self.count, self.began, self.shortest = 0, 0.0, math.inf

    def before(self, step: int) -> None:
        self.count += 1
        self.began = time.perf_counter()
        if self.count == self.save:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(self.share * self.shortest, 1e-5))

    def after(self, step: int) -> None:
        self.shortest = min(self.shortest, time.perf_counter() - self.began)


class PowerFails:
    """After one of its saves the power goes: what wasn't forced since the save began is lost.

    All that was written before the save counts as written back by the system, though it may not be.
    Of the save itself the names got to the disk or didn't, the bytes only where they were forced.
    """

    def __init__(self, root: Path, left: Path, draw: random.Random) -> None:
        self.save, self.ahead = draw.randint(2, 6), draw.random() < 0.5
        self.count, self.left = 0, left
        self.disk = VolatileDisk(root, lambda place: None)
        plain = os.fsync

        def forced(file: Any) -> None:
            plain(file)
            number = file if isinstance(file, int) else file.fileno()
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.is_relative_to(root.resolve()):
                self.disk.force(path)

        vars(os).update(fsync=forced, fdatasync=forced)  # this process is a fork for this one case

    def before(self, step: int) -> None:
        self.count += 1
        for path in [self.disk.root, *self.disk.root.rglob("*")]:
            self.disk.force(path)

    def after(self, step: int) -> None:
        if self.count == self.save:
            self.disk.left(self.left, self.ahead)
            os._exit(0)


def record(index: int, poison: int | None = None) -> dict[str, Tensor]:
    """A batch of the kit's loop; the ``poison``-th has a number that isn't one."""
    x, y = batch_of_step(index + 1)
    if index == poison:
        x = x.clone()
        x[0, 0] = torch.nan
    return {"x": x, "y": y}


class Records(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Of a map-style data set, as most have."""

    def __init__(self, poison: int | None, count: int = RECORDS) -> None:
        self.count = count
        self.poison = None if poison is None else poison % count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return record(index, self.poison)


def alone(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A record is a batch already."""
    (row,) = rows
    return row


def finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


class Peer:
    """Another trainer, by a function that trains with it."""

    steps = STEPS

    def __init__(self, train: Callable[..., None], newest: Callable[[Path], list[Path]]) -> None:
        self._train, self.newest = train, newest

    def train(
        self, folder: Path, steps: int, tell: Callable[[str], None], poison: int | None = None
    ) -> None:
        self._train(folder, steps, tell, NoHook(), poison)

    def train_and_die(
        self, folder: Path, steps: int, tell: Callable[[str], None], draw: random.Random
    ) -> None:
        self._train(folder, steps, tell, DiesInside(draw), None)

    def train_until_dark(
        self, root: Path, run: str, left: Path, tell: Callable[[str], None], draw: random.Random
    ) -> None:
        hook = PowerFails(root, left, draw)
        self._train(root / run, self.steps, tell, hook, None)
