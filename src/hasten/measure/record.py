"""The record of an experiment: a file with one line per finished piece of work.

All results of an experiment are computed from these lines (see ``rounds``). A process
that is killed therefore loses at most its current turn. The next process reads the
lines and does the missing work. An incomplete last line was being written when the
process died; it is cut off. The first line has the key of everything that decides the
numbers. A record with another key isn't changed.

An event is an object with ``event``, its kind, and ``at``, the seconds since its
process opened the record:

    run: a process opened the record to measure
    cohort, members: fresh processes for these variants; equal steps in each round
    start, variant seconds: a variant is ready
    warmup, variant steps: its steps before the first round
    evaluate, variant tokens loss: its eval loss
    turn, variant round steps: one turn, with the background load of the machine
    finish, variant effective: the effects of its techniques, and its samples
    failed, unfinished: a variant, and the reason
    cohort_done: the cohort's rounds are complete
    turns, length: steps of each turn, if the budget allows fewer than requested
    rounds, dropped: the rounds that the budget allows, and the dropped variants
    done: nothing is missing
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.foreign_files import read_bounded

Event = dict[str, Any]
VERSION = 2
LARGEST = 256 << 20  # bytes


class ExperimentRecord:
    """A record in a file, or only in memory if there is no path.

    Args:
        path: the file; created if it doesn't exist.
        key: key of the experiment, see `hasten.machine.cache.key_of`.
        began: start of its seconds, on the clock; default: now.
        clock: returns the time, in seconds.

    Raises:
        InputError: the file can't be written, isn't a record, or belongs to another
            experiment.
    """

    def __init__(
        self,
        path: Path | None = None,
        key: str = "",
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._clock = path, clock
        self.events: list[Event] = []
        self._earlier = 0.0  # seconds of the starts before this one
        self._began = clock() if began is None else began
        self._file = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.events = _read(path, key)
            self._earlier = seconds_of(self.events, with_turns=True)
            self._file = path.open("ab")
        except OSError as error:
            raise InputError(
                f"the record {path} can't be written: {error.strerror or error}"
            ) from error
        if not self._file.tell():
            self._write({"record": VERSION, "key": key})

    def __enter__(self) -> ExperimentRecord:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def done(self) -> bool:
        return any(e["event"] == "done" for e in self.events)

    @property
    def elapsed(self) -> float:
        """Seconds since this process opened the record, or since the moment that it was given."""
        return self._clock() - self._began

    @property
    def spent(self) -> float:
        """The same, with the seconds of earlier starts of which turns are kept."""
        return self._earlier + self.elapsed

    def append(self, event: str, **details: Any) -> None:
        """Note what happened; it is in the file when this returns."""
        entry = {"event": event, "at": round(self.elapsed, 3), **details}
        self.events.append(entry)
        self._write(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, entry: Event) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # a line for a turn of seconds: it costs nothing


def seconds_of(events: Sequence[Event], with_turns: bool = False) -> float:
    """Seconds of all processes of a record, or only of processes with stored turns."""
    durations: list[float] = []
    for e in events:
        if e["event"] == "run" or not durations:
            durations.append(0.0)
            is_counted = not with_turns
        is_counted = is_counted or e["event"] == "turn"
        durations[-1] = float(e.get("at", 0.0)) if is_counted else 0.0
    return math.fsum(durations)


def _read(path: Path, key: str) -> list[Event]:
    """The record's complete lines; what is behind them is cut off the file."""
    if not path.exists():
        return []
    content = read_bounded(path, LARGEST, "record of an experiment")
    complete = content[: content.rfind(b"\n") + 1]
    try:
        head, *lines = [json.loads(line) for line in complete.splitlines()] or [{"key": key}]
        recorded_key, version = head["key"], head.get("record", VERSION)
        if not all(isinstance(line["event"], str) for line in lines):
            raise ValueError("an event without a name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not the record of an experiment: delete it, or give --fresh"
        ) from error
    if recorded_key != key:
        raise InputError(f"{path} is the record of another experiment: delete it, or give --fresh")
    if version != VERSION:
        raise InputError(
            f"{path} is a record of version {version!r}, and version {VERSION} is read: delete it, "
            "or give --fresh"
        )
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return lines
