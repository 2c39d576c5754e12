"""A run as its folder shows it just now: files followed, numbers in series, and where it stands.

    metrics, evaluations, machine .jsonl     -> series
    restarts, spikes, quarantined, adjustments .jsonl   -> events
    run.json, summary.json, ranks/R.json     -> what is said once

Nothing is written. A folder that can't be read any more keeps what was seen of it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hasten.formatting import number, open_regular
from hasten.monitor import events as told
from hasten.monitor.events import Event, Events
from hasten.monitor.following import Following
from hasten.monitor.series import Series
from hasten.monitor.standing import RECENT, standing

STEP_COLUMNS = (
    *("loss", "tokens_per_second", "mfu", "peak_memory_bytes", "data_stall_share"),
    *("exposed_communication_share", "wire_bytes"),
    *("expert_load_ratio", "grad_norm", "learning_rate", "padding_share", "step_seconds"),
)
MACHINE_COLUMNS = (
    *("device_utilisation", "device_temperature", "device_power_watts", "device_memory_bytes"),
    *("host_utilisation", "host_memory_bytes", "disk_free_bytes"),
)
# Shares of a step's time, and the field of a line that has their seconds.
SHARES = {
    "data_stall_share": "data_seconds",
    "exposed_communication_share": "exposed_communication_seconds",
}
LARGEST = 8 << 20  # bytes of a file that is read whole
MOST_RANKS = 4096
Line = dict[str, Any]


class Run:
    """One run. ``look`` reads what is new; ``lock`` is held while it changes anything."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.version = 0  # changes with anything that can be shown
        self.trouble = ""
        self.answered = time.time()  # when the folder last did, or refused
        self.last_sign: float | None = None  # when a step's line was last written
        self.steps = Series(STEP_COLUMNS)
        self.evaluations = Series(("held_out_loss",))
        self.machine = Series(MACHINE_COLUMNS)
        self.events = Events()
        self.start: Line = {}
        self.summary: Line = {}
        self.ranks: dict[str, Line] = {}
        self._files = [
            _File(folder / "metrics.jsonl", self._step, self._steps_anew),
            _File(folder / "evaluations.jsonl", self._evaluation, self._evaluations_anew),
            _File(folder / "machine.jsonl", self._machine, self._machine_anew),
            *(
                _File(folder / name, self._event(make), self._forgetting(kind))
                for name, kind, make in (
                    ("restarts.jsonl", "restart", told.of_restart),
                    ("spikes.jsonl", "spike", told.of_spike),
                    ("quarantined.jsonl", "quarantined", told.of_quarantine),
                    ("adjustments.jsonl", "adjusted", told.of_adjustment),
                )
            ),
        ]
        self._stamps: dict[Path, tuple[int, int, int]] = {}

    def _steps_anew(self) -> None:
        self.steps.clear()
        self.events.forget("skipped")
        self.last: Line = {}
        self.recent: deque[Line] = deque(maxlen=RECENT)
        self.seconds = self.tokens = 0.0
        self.skipped = 0

    def _evaluations_anew(self) -> None:
        self.evaluations.clear()
        self.held_out: float | None = None

    def _machine_anew(self) -> None:
        self.machine.clear()
        self.machine_last: Line = {}

    def look(self) -> bool:
        """Read what is new; True where more is waiting to be read at once."""
        more = changed = False
        try:
            self.folder.stat()  # files of a vanished disk would only seem to be missing
            for file in self._files:
                look = file.follow.look()
                more |= look.more
                with self.lock:
                    if look.anew:
                        file.anew()
                    for line in look.lines:
                        file.take(line)
                changed |= bool(look.lines) or look.anew
            changed |= self._small_files()
            sign, trouble = _changed(self._files[0].follow.path), ""
        except OSError as error:
            sign = self.last_sign
            trouble = told.short(f"the folder can't be read: {error.strerror or error}")
        with self.lock:
            self.answered, self.last_sign = time.time(), sign
            changed |= trouble != self.trouble
            self.trouble = trouble
            self.version += changed
        return more

    @property
    def unreadable(self) -> int:
        """Lines that were whole and no JSON."""
        return sum(file.follow.unreadable for file in self._files)

    @property
    def torn(self) -> bool:
        """Whether a file of steps ends in the middle of a line."""
        return any(file.follow.torn for file in self._files)

    @property
    def share_read(self) -> float:
        """How much of the steps has been read, 0 to 1."""
        return self._files[0].follow.share if self._files[0].follow.share else 1.0

    def standing(self, now: float | None = None) -> dict[str, Any]:
        """Where the run stands; the lock must be held."""
        return standing(self, time.time() if now is None else now)

    def _step(self, line: Line) -> None:
        seconds = number(line.get("step_seconds"))
        for name, part in SHARES.items():
            spent = number(line.get(part))
            if seconds and spent is not None:
                line[name] = spent / seconds
        step = number(line.get("step"))
        self.steps.add(self.steps.lines + 1 if step is None else step, line)
        self.seconds += seconds or 0.0
        self.tokens += number(line.get("tokens")) or 0.0
        self.last = line
        self.recent.append(line)
        if line.get("skipped"):
            self.skipped += 1
            self.events.add(told.of_skipped(line))

    def _evaluation(self, line: Line) -> None:
        self.evaluations.add(number(line.get("step")) or 0, line)
        self.held_out = number(line.get("held_out_loss"))

    def _machine(self, line: Line) -> None:
        self.machine.add(number(line.get("step")) or 0, line)
        self.machine_last = line

    def _event(self, make: Callable[[Line], Event | None]) -> Callable[[Line], None]:
        def take(line: Line) -> None:
            event = make(line)
            if event is not None:
                self.events.add(event)

        return take

    def _forgetting(self, kind: str) -> Callable[[], None]:
        return lambda: self.events.forget(kind)

    def _small_files(self) -> bool:
        start, summary = self.folder / "run.json", self.folder / "summary.json"
        changed = False
        if self._is_new(start):
            found, before = _object(start), told.earlier_plan(self.folder)
            with self.lock:
                changed, self.start = True, found
                self.events.forget("plan")
                other = told.of_plan(found.get("plan"), before) if before is not None else None
                if other is not None:
                    self.events.add(other)
        if self._is_new(summary):
            found = _object(summary)
            with self.lock:
                changed, self.summary = True, found
        for path in sorted((self.folder / "ranks").glob("*.json"))[:MOST_RANKS]:
            if self._is_new(path):
                found = _object(path)
                with self.lock:
                    changed, self.ranks[path.stem] = True, found
        return changed

    def _is_new(self, path: Path) -> bool:
        """Whether a file is another than at the last look; one that went away is, too."""
        try:
            stat = path.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            stamp = (0, 0, 0)
        before = self._stamps.get(path, (0, 0, 0))
        self._stamps[path] = stamp
        return stamp != before


class _File:
    """A followed file, what takes its lines, and what forgets them."""

    def __init__(self, path: Path, take: Callable[[Line], None], anew: Callable[[], None]) -> None:
        self.follow, self.take, self.anew = Following(path), take, anew
        anew()


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _object(path: Path) -> Line:
    """A file's JSON object; an empty one where it's missing, half written, or something else."""
    try:
        with open_regular(path) as file:
            data = file.read(LARGEST + 1)
        found = json.loads(data) if len(data) <= LARGEST else None
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
