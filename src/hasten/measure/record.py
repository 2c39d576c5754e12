"""The record of an experiment: a file to which every finished piece of work is appended as a line.

Whatever is known of an experiment is computed from its lines (see ``rounds``), so a process that is
killed loses no more than the turn it was in: the next one reads the lines and does what is missing.
A last line without its end was being written when the process died; it is cut off. The first line
carries the key of all that decides the numbers; a record with another key isn't touched.

An event is an object with ``event``, its kind, and ``at``, the seconds since its process opened the
record:

    run                       a process opened the record to measure
    cohort   members          fresh processes for these variants, all its rounds at the same steps
    start    variant seconds      a variant is ready
    warmup   variant steps        its steps before the first round
    evaluate variant tokens loss  its eval loss
    turn     variant round steps  one turn, with the machine's background load meanwhile
    finish   variant acted        what its techniques did, and its samples
    failed, unfinished        a variant, and why
    cohort_done               the cohort's rounds are complete
    turns    length           steps of each turn, where the budget allows fewer than asked for
    rounds, dropped           what the budget allows, and what it doesn't
    done                      nothing is missing
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hasten.errors import InputError

Event = dict[str, Any]
VERSION = 2


class ExperimentRecord:
    """A record in a file, or in memory alone where there is no path.

    Args:
        path: the file; made if it isn't there.
        key: of the experiment, see `hasten.machine.cache.key_of`.
        began: the moment (of the clock) from which its seconds count, if not this one.
        clock: tells the time, in seconds.

    Raises:
        InputError: the file can't be written, isn't a record, or is one of another experiment.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
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
    """What all processes of a record took; or those alone of which turns are kept."""
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
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    try:
        head, *lines = [json.loads(line) for line in complete.splitlines()] or [{"key": key}]
        recorded_key, version = head["key"], head.get("record", VERSION)
        if not all(isinstance(line["event"], str) for line in lines):
            raise ValueError("an event without a name")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not the record of an experiment: delete it, or say --fresh"
        ) from error
    if recorded_key != key:
        raise InputError(f"{path} is the record of another experiment: delete it, or say --fresh")
    if version != VERSION:
        raise InputError(
            f"{path} is a record of version {version!r}, and version {VERSION} is read: delete it, "
            "or say --fresh"
        )
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return lines
