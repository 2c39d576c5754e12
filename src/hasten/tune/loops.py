"""A training loop of anybody's as a subject: its factory's arguments are the settings."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.machine import host, processes
from hasten.measure.grouping import SHARE
from hasten.measure.turns import Runner
from hasten.tune.duel import duel, judged
from hasten.tune.proposers import Beforehand
from hasten.tune.runners import LoopRunner
from hasten.tune.space import Point, Space
from hasten.tune.subject import Wishes


class LoopSubject:
    """A factory that takes the settings as arguments.

    Args:
        target: ``module:function`` or ``/path/script.py:function``.
        space: the arguments and their values.
        folder: of its studies.
        wishes: how.
    """

    unit = "items/s"
    together = 1

    def __init__(self, target: str, space: Space, folder: Path, wishes: Wishes) -> None:
        self._target, self.space, self.folder, self._wishes = target, space, folder, wishes
        self.title = target.rpartition("/")[2]
        self.about = {"loop": target}

    def key(self) -> dict[str, Any]:
        place = self._target.rpartition(":")[0]
        source = Path(place).read_text() if place.endswith(".py") else ""
        names = [(d.name, [str(v) for v in d.values]) for d in self.space.dimensions]
        return {
            "loop": self._target,
            "source": source,
            "space": names,
            "start": self.space.start,
            "hardware": asdict(host.hardware()),
        }

    def opened(self, folder: Path) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def known(self, noise: float, memory: float | None) -> Beforehand:
        limit = SHARE * processes.available_bytes(host.hardware().memory_limit_bytes)
        return Beforehand(limit=limit, noise=noise)

    def start(self, point: Point) -> Runner:
        return LoopRunner(self._target, self.space.settings(point))

    def duel(
        self,
        leaders: Sequence[Point],
        seconds: float,
        step_seconds: float,
        tell: Callable[[str], None],
    ) -> dict[str, Any]:
        deadline, wishes = time.monotonic() + seconds, self._wishes
        arms = duel(
            self.start, self.space.start, leaders, deadline, wishes.steps, wishes.seed, tell
        )
        return judged(arms)

    def refusal(self, point: Point) -> str | None:
        return None

    def without(self, point: Point, idle: Sequence[str]) -> tuple[Point, list[str]]:
        return point, []

    def text(self, point: Point, words: Sequence[str]) -> str:
        """The arguments as JSON; words under ``_measured``, since JSON has no comments."""
        return json.dumps({"_measured": list(words), **self.space.settings(point)}, indent=1) + "\n"
