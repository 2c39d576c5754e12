"""Finds the runs below the user's folders, and reads each in a thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.monitor.run import Run

MARKS = ("metrics.jsonl", "run.json", "summary.json")  # files that identify a run's folder
INSIDE = frozenset(  # folders inside a run, which aren't searched
    {*("previous", "data", "checkpoints", "model", "adapter", "best", "merged", "ranks")}
    | {*("model_average", "adapter_average", "tensorboard", "wandb", "mlflow")}
)
DEEPEST = 4  # levels of folders that are searched
MOST_FOLDERS = 5_000  # folders that are searched; a home directory may have millions
MOST_RUNS = 32  # newest runs that are shown


def is_run(folder: Path) -> bool:
    """Returns True if a folder has one of the files of a run."""
    return any((folder / name).is_file() for name in MARKS)


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """Returns the folders of the newest ``MOST_RUNS`` runs at or below ``places``, by name.

    A name is the path below the place, or the place's own name if it is a run.
    """
    runs: dict[str, Path] = {}
    for root in places:
        for folder in _below(root):
            name = root.resolve().name if folder == root else str(folder.relative_to(root))
            if name in runs and runs[name] != folder:
                name = str(folder)
            runs.setdefault(name, folder)
    newest = sorted(runs, key=lambda name: _changed(runs[name]), reverse=True)[:MOST_RUNS]
    return {name: runs[name] for name in sorted(newest)}


def check_places(places: Sequence[Path]) -> None:
    """Raises InputError if a place can't be read, or neither is nor contains a run."""
    for root in places:
        try:
            os.scandir(root).close()
        except FileNotFoundError as error:
            raise InputError(
                f"{root}: there is no such folder; give a run's folder, the `output` of its recipe"
            ) from error
        except OSError as error:
            raise InputError(
                f"{root}: can't be looked into ({error.strerror}); give a run's folder, the "
                "`output` of its recipe"
            ) from error
        if next(_below(root), None) is None:
            raise InputError(
                f"{root}: no run is in it, {DEEPEST} folders deep ({', '.join(MARKS)}); "
                "give the `output` of a recipe that has begun to train"
            )


def _below(root: Path) -> Iterator[Path]:
    """Yields folders of runs, the highest level first; links aren't followed, so it ends."""
    level, looked = [root], 0
    for _ in range(DEEPEST + 1):
        following: list[Path] = []
        for folder in level:
            looked += 1
            if looked > MOST_FOLDERS:
                return
            if is_run(folder):
                yield folder
            else:
                following += _folders(folder)
        level = following


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [
                e.name
                for e in entries
                if not e.name.startswith(".")
                and e.name not in INSIDE
                and e.is_dir(follow_symlinks=False)
            ]
    except OSError:  # not readable by this user
        return []
    return [folder / name for name in sorted(names)]


def _changed(folder: Path) -> float:
    times = [0.0]
    for name in MARKS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


# All watched runs, each read by its own thread.
#
# A hanging disk blocks a thread inside the kernel, where no time limit helps. With one thread per
# run, only the runs on that disk are affected.

EVERY_SECONDS = 1.0  # interval at which a run is read
FIND_SECONDS = 5.0  # interval at which new runs are searched
MOST_EVENTS = 100  # newest events in an update

Cursor = dict[str, tuple[int, int]]  # (generation, number of sent buckets) by series


class RunsReader:
    """Finds the runs at or below ``places``; inside ``with``, threads read them.

    ``after_look`` is called with each run after a read, to check alerts.
    """

    def __init__(
        self, places: Sequence[Path], after_look: Callable[[Run], None] = lambda run: None
    ) -> None:
        self._places, self._after = list(places), after_look
        self._runs: dict[str, Run] = {}
        self._over = threading.Event()

    def __enter__(self) -> RunsReader:
        self._find()
        threading.Thread(target=self._keep_finding, daemon=True, name="finding").start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._over.set()

    @property
    def runs(self) -> list[Run]:
        """Returns the runs in the order of their discovery, so that a run keeps its colour."""
        return list(self._runs.values())

    def standings(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns name and state of each run."""
        standings = []
        for run in self.runs:
            with run.lock:
                standings.append((run.name, run.standing()))
        return standings

    def read_all(self) -> None:
        """Reads everything once without threads, for a single output."""
        folders = find_runs(self._places)
        self._runs |= {n: Run(n, f) for n, f in folders.items() if n not in self._runs}
        for run in self.runs:
            while run.look():
                pass
            self._after(run)

    def _find(self) -> None:
        with contextlib.suppress(OSError):  # a disk may come back
            for name, folder in find_runs(self._places).items():
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


def page_update(run: Run, cursor: Cursor | None) -> dict[str, Any]:
    """Returns a run's data since ``cursor`` for the page, as JSON values; advances the cursor.

    Without a cursor it is state and events alone.
    """
    with run.lock:
        update: dict[str, Any] = {"name": run.name, "standing": run.standing(time.time())}
        update["events"] = run.events.newest(MOST_EVENTS)
        if cursor is None:
            return update
        for name in ("steps", "evaluations", "machine"):
            series = getattr(run, name)
            update[name] = series.since(*cursor.get(name, (0, 0)))
            # The last bucket may still change, so it is sent again.
            cursor[name] = (series.generation, max(len(series) - 1, 0))
        if cursor.get("samples") != (0, run.samples_read):
            cursor["samples"] = (0, run.samples_read)
            update["samples"] = [*reversed(run.samples)]
    return update
