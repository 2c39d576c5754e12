"""All runs that are watched, each read by a thread of its own.

A disk that hangs keeps a thread waiting inside the kernel, and no time limit gets it out; so it
holds up that run alone, and the others, and whoever asks, go on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hasten.monitor.finding import find_runs
from hasten.monitor.run import Run

EVERY_SECONDS = 1.0
FIND_SECONDS = 5.0
MOST_EVENTS = 100

Cursor = dict[str, tuple[int, int]]  # of one run's series: generation and how many are known


class Watching:
    """The runs at or below some places; ``start`` begins to read them, ``close`` ends it.

    ``after_look`` is called with each run after it was read; for alerts.
    """

    def __init__(
        self, places: Sequence[Path], after_look: Callable[[Run], None] = lambda run: None
    ) -> None:
        self._places, self._after = list(places), after_look
        self._runs: dict[str, Run] = {}
        self._over = threading.Event()

    def start(self) -> None:
        self._find()
        threading.Thread(target=self._keep_finding, daemon=True, name="finding").start()

    def close(self) -> None:
        self._over.set()

    def __enter__(self) -> Watching:
        self.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    @property
    def runs(self) -> list[Run]:
        """In the order of their discovery, so that a run keeps its colour."""
        return list(self._runs.values())

    def read_all(self) -> None:
        """Read everything once, here and now, without threads; for a single look."""
        self._runs |= {n: Run(n, f) for n, f in self._found().items() if n not in self._runs}
        for run in self.runs:
            while run.look():
                pass
            self._after(run)

    def _found(self) -> dict[str, Path]:
        return find_runs(self._places)

    def _find(self) -> None:
        with contextlib.suppress(OSError):  # a disk that comes back is looked at again
            for name, folder in self._found().items():
                if name not in self._runs:
                    run = self._runs[name] = Run(name, folder)
                    threading.Thread(
                        target=self._follow, args=(run,), daemon=True, name=f"following {name}"
                    ).start()

    def _keep_finding(self) -> None:
        while not self._over.wait(FIND_SECONDS):
            self._find()

    def _follow(self, run: Run) -> None:
        while not self._over.is_set():
            more = run.look()
            self._after(run)
            if not more:
                self._over.wait(EVERY_SECONDS)


def shown(run: Run, cursor: Cursor, now: float | None = None) -> dict[str, Any]:
    """What a page lacks of a run, and its cursor moved on: JSON-ready."""
    now = time.time() if now is None else now
    with run.lock:
        found: dict[str, Any] = {"name": run.name, "standing": run.standing(now)}
        found["events"] = run.events.newest(MOST_EVENTS)
        for name in ("steps", "evaluations", "machine"):
            series = getattr(run, name)
            found[name] = series.since(*cursor.get(name, (0, 0)))
            # The last bucket may still take lines, so it is sent again.
            cursor[name] = (series.generation, max(len(series) - 1, 0))
    return found
