"""A run's state, read from its folder: followed files, series of numbers, events.

    metrics, evaluations, machine .jsonl     -> series
    restarts, spikes, quarantined, adjustments .jsonl   -> events
    run.json, summary.json, ranks/R.json     -> read again when they change

The newest lines of samples.jsonl and the bytes of report.html are stored unchanged.
If a folder can't be read any more, the values read from it stay. The monitor writes only
``stop``, an empty file that makes the run save and stop.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hasten.foreign_files import STOP_FILE, open_regular
from hasten.formatting import duration, number, numbers_of
from hasten.monitor import events as run_events
from hasten.monitor.events import Event, Events, lines_of, short
from hasten.monitor.series import Series, slowdown

# The state of a run: one flat object for page, terminal, Prometheus and alerts.

RECENT = 200  # last steps, from which rates and their quantiles are computed
# A run is silent without a new step for this time or number of median steps, whichever is longer.
SILENT_SECONDS, SILENT_STEPS = 60.0, 20.0
HUNG_SECONDS = 10.0  # time without a finished read after which the folder counts as unreadable
FINISHED = ("done", "early stop", "time limit", "interrupted", "left")
ACTIVE = ("starting", "running", "silent", "reading")
SAMPLES = 24  # newest samples that are shown
LONGEST_SAMPLE = 2_000  # characters of a prompt or an answer
LARGEST_REPORT = 2 << 20  # bytes; hasten's own pages are below 500 kB


def run_numbers(run: Run, now: float) -> dict[str, Any]:
    """Returns the run's numbers; None if unknown."""
    last, summary, start = run.last, run.summary, run.start
    rates = numbers_of(run.recent, "tokens_per_second")
    seconds = numbers_of(run.recent, "step_seconds")
    middle = statistics.median(seconds) if seconds else None
    # Median absolute deviation / median.
    spread = statistics.median(abs(s - middle) for s in seconds) / middle if middle else None
    sign = run.last_sign
    status, description = _status(run, now, sign, middle)
    finished = status in FINISHED
    goes_on = status in ("running", "silent", "reading")
    slowest = _slowest(run.ranks)
    slow = None
    if status in ("running", "silent"):
        slow = slowdown(run.steps, list(run.recent), run.machine_last, slowest)
    return {
        "status": status,
        "words": description,
        "step": number(last.get("step")),
        "total_steps": number(start.get("total_steps")),
        "tokens": number(summary.get("tokens")) if finished else run.tokens,
        "seconds": run.seconds,
        "eta_seconds": number(last.get("eta_seconds")) if goes_on else None,
        "last_sign": sign,
        "loss": number(last.get("loss")),
        "eval_loss": run.eval_data,
        "reward_accuracy": _mean_of(run.recent, "reward_accuracy"),
        "reward_margin": _mean_of(run.recent, "reward_margin"),
        "indexer_kl": _mean_of(run.recent, "indexer_kl"),
        "indexer_captured": _mean_of(run.recent, "indexer_captured"),
        "tokens_per_second": number(last.get("tokens_per_second")),
        "tokens_per_second_median": statistics.median(rates) if rates else None,
        "tokens_per_second_low": _quantile(rates, 0.1),
        "tokens_per_second_high": _quantile(rates, 0.9),
        "step_seconds_median": middle,
        "step_spread": spread,
        "mfu": _mean_of(run.recent, "mfu"),
        "peak_memory_bytes": number(last.get("peak_memory_bytes")),
        "padding_share": _mean_of(run.recent, "padding_share"),
        "data_stall_share": _mean_of(run.recent, "data_stall_share"),
        "exposed_communication_share": _communication(run),
        "comm_bytes": _mean_of(run.recent, "comm_bytes"),
        "expert_load_ratio": number(last.get("expert_load_ratio")),
        "grad_norm": number(last.get("grad_norm")),
        "learning_rate": number(last.get("learning_rate")),
        "skipped_steps": run.skipped,
        "world_size": number(start.get("world_size")) or number(summary.get("world_size")),
        **{name: number(run.machine_last.get(name)) for name in MACHINE_COLUMNS},
        **_cost(run, finished),
        **slowest,
        "slow": slow,
        "stop_requested": run.stop_requested and status in ACTIVE,
        "unreadable_lines": run.unreadable,
        "folder": short(str(run.folder)),
        "has_report": bool(run.report),
        "model": short(start.get("model") or ""),
        "dataset": short(start.get("dataset") or ""),
        "hardware": short(start.get("hardware") or ""),
    }


def _status(run: Run, now: float, sign: float | None, middle: float | None) -> tuple[str, str]:
    if run.trouble:
        return "unreadable", run.trouble
    if now - run.answered > HUNG_SECONDS:
        since = duration(now - run.answered)
        return (
            "unreadable",
            f"the folder hasn't answered for {since}; what was seen before is shown",
        )
    if run.share_read < 1 and not run.torn:
        return "reading", f"reading the run's files, {run.share_read:.0%}"
    if run.summary:
        stopped = run.summary.get("stopped")
        return (stopped, stopped) if stopped in FINISHED else ("done", "done")
    if _is_gone(run.start):
        torn = "; its last line is cut off" if run.torn else ""
        return "ended", f"its process is gone and left no summary.json{torn}"
    if sign is None:
        return "starting", "no step yet"
    age = now - sign
    if age > max(SILENT_SECONDS, SILENT_STEPS * (middle or 0.0)):
        torn = "; its last line is cut off" if run.torn else ""
        return "silent", f"no step for {duration(age)}{torn}"
    return "running", "running"


def _is_gone(start: Mapping[str, Any]) -> bool:
    pid, began = start.get("pid"), number(start.get("began"))
    if not isinstance(pid, int) or began is None or start.get("host") != platform.node():
        return False
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # ended, but its parent hasn't waited for it
            return True
        return bool(process.create_time() > began + 1)  # a later process has the same id
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError, OverflowError):
        return False


def _cost(run: Run, finished: bool) -> dict[str, Any]:
    """Returns the cost of the steps so far; for a finished run, the cost in its summary.

    After a resume the summary has the cost of the last process alone.
    """
    summary_cost = run.summary.get("cost")
    if finished and isinstance(summary_cost, dict) and not run.summary.get("resumed_step"):
        return {
            "cost": number(summary_cost.get("total")),
            "currency": short(summary_cost.get("currency") or ""),
        }
    hour = number(run.start.get("price_per_hour"))
    cost = None if hour is None else hour * run.seconds / 3600
    return {"cost": cost, "currency": short(run.start.get("currency") or "")}


def _slowest(ranks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the rank with the most seconds for data, copy and forward, and its ratio."""
    times = {rank: number(line.get("own_seconds")) for rank, line in ranks.items()}
    busy_seconds = {rank: seconds for rank, seconds in times.items() if seconds and seconds > 0}
    if len(busy_seconds) < 2:
        return {"slowest_rank": None, "slowest_rank_ratio": None}
    slowest = max(busy_seconds, key=lambda rank: busy_seconds[rank])
    others = statistics.median(s for rank, s in busy_seconds.items() if rank != slowest)
    return {"slowest_rank": slowest, "slowest_rank_ratio": busy_seconds[slowest] / others}


def _communication(run: Run) -> float | None:
    """Returns the mean exposed communication share of recent steps.

    If the steps' lines don't have it, it is the share in the finished run's summary.
    """
    recent = _mean_of(run.recent, "exposed_communication_share")
    parts = run.summary.get("step_parts")
    if recent is not None:
        return recent
    if not isinstance(parts, dict):
        return None
    seconds, total = number(parts.get("communication")), sum(number(v) or 0 for v in parts.values())
    return seconds / total if seconds is not None and total else None


def _mean_of(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = numbers_of(lines, name)
    return sum(values) / len(values) if values else None


def _quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


# Follows a file of JSON lines that another process writes.
#
# A line counts once its end is written; an incomplete line waits for the next read. The file may be
# replaced (a restarted run removes lines), cut, or disappear with its disk. Then the file is read
# again from its start, and the result has ``anew``. A replaced file is detected by its inode, its
# size, and the bytes before the offset, because inodes and sizes are reused.

LOOK_BYTES = 4 << 20  # most bytes of one read
ANCHOR_BYTES = 64  # bytes before the offset that are compared


@dataclass
class FollowedLines:
    """Result of one read; ``anew``: the file was replaced, so lines read earlier are void."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    anew: bool = False
    more: bool = False  # True: more lines wait for the next read


class FollowedFile:
    """Follows one file; ``look`` returns the lines since the last call.

    ``unreadable`` is the number of complete lines that aren't a JSON object. ``torn`` is
    True if the file ends in the middle of a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.share = 0.0  # share of the file that has been read
        self._forget()

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._offset: int = 0
        self._anchor: bytes = b""
        self.unreadable = 0
        self.torn = False

    def look(self) -> FollowedLines:
        """Returns the lines that were completed since the last call.

        Raises:
            OSError: the file exists and can't be read, or its disk is gone.
        """
        try:
            with open_regular(self.path, follow_links=False) as file:
                return self._read(file)
        except FileNotFoundError:
            had = self._offset > 0
            self._forget()
            return FollowedLines(anew=had)

    def _read(self, file: Any) -> FollowedLines:
        now = os.fstat(file.fileno())
        followed = FollowedLines()
        identity = (now.st_dev, now.st_ino)
        if self._offset and not self._same(file, identity, now.st_size):
            self._forget()
            followed.anew = True
        self._identity = identity
        file.seek(self._offset)
        data = file.read(LOOK_BYTES) or b""
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LOOK_BYTES:  # hasten writes no such line
            end = len(data)
        followed.lines = self._parsed(data[:end])
        if end:
            self._offset += end
            self._anchor = (self._anchor + data[:end])[-ANCHOR_BYTES:]
        followed.more = bool(end) and self._offset < now.st_size
        self.torn = not followed.more and self._offset < now.st_size
        self.share = self._offset / now.st_size if now.st_size else 1.0
        return followed

    def _parsed(self, data: bytes) -> list[dict[str, Any]]:
        rows = []
        for line in filter(bytes.strip, data.split(b"\n")):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                value = None
            if isinstance(value, dict):
                rows.append(value)
            else:
                self.unreadable += 1
        return rows

    def _same(self, file: Any, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return False
        file.seek(self._offset - len(self._anchor))
        return bool(file.read(len(self._anchor)) == self._anchor)


STEP_COLUMNS = (
    *("loss", "tokens_per_second", "mfu", "peak_memory_bytes", "data_stall_share"),
    *("exposed_communication_share", "comm_bytes"),
    *("expert_load_ratio", "grad_norm", "learning_rate", "padding_share", "step_seconds"),
    *("reward_accuracy", "reward_margin", "chosen_logp", "rejected_logp", "log_ratio"),
    *("indexer_kl", "indexer_captured"),
)
MACHINE_COLUMNS = (
    *("device_utilisation", "device_temperature", "device_power_watts", "device_memory_bytes"),
    *("host_utilisation", "host_memory_bytes", "disk_free_bytes"),
    *("foreign_load", "disk_wait_share"),
)
# Shares of a step's time, and the key of their seconds in a line.
SHARES = {
    "data_stall_share": "data_seconds",
    "exposed_communication_share": "exposed_comm_seconds",
}
MOST_RANKS = 4096  # files of ranks that are read
Line = dict[str, Any]


class Run:
    """One run. ``look`` reads new data, and takes ``lock`` for each change."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.version = 0  # increases with every visible change
        self.trouble = ""
        self.answered = time.time()  # time of the last finished read, successful or not
        self.last_sign: float | None = None  # time of the last step's line
        self.steps = Series(STEP_COLUMNS)
        self.evaluations = Series(("eval_loss", "reward_accuracy"))
        self.machine = Series(MACHINE_COLUMNS)
        self.events = Events()
        self.start: Line = {}
        self.summary: Line = {}
        self.ranks: dict[str, Line] = {}
        self.report = b""
        self.stop_requested = False
        self._files = [
            _File(folder / "metrics.jsonl", self._step, self._steps_anew),
            _File(folder / "evaluations.jsonl", self._evaluation, self._evaluations_anew),
            _File(folder / "machine.jsonl", self._machine, self._machine_anew),
            _File(folder / "samples.jsonl", self._sample, self._samples_anew),
            *(
                _File(folder / name, partial(self._event, make), partial(self.events.forget, kind))
                for name, kind, make in (
                    ("restarts.jsonl", "restart", run_events.of_restart),
                    ("spikes.jsonl", "spike", run_events.of_spike),
                    ("quarantined.jsonl", "quarantined", run_events.of_quarantine),
                    ("adjustments.jsonl", "adjusted", run_events.of_adjustment),
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
        self.eval_data: float | None = None

    def _machine_anew(self) -> None:
        self.machine.clear()
        self.machine_last: Line = {}

    def _samples_anew(self) -> None:
        self.samples: deque[Line] = deque(maxlen=SAMPLES)
        self.samples_read = 0

    def request_stop(self) -> None:
        """Makes the run save and stop after its step, as Ctrl-C does.

        Raises:
            OSError: the folder can't be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(self.folder / STOP_FILE, flags | getattr(os, "O_NONBLOCK", 0), 0o666))

    def look(self) -> bool:
        """Reads new data; returns True if there is more to read."""
        more = changed = False
        try:
            self.folder.stat()  # raises if the disk has gone
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
            trouble = run_events.short(f"the folder can't be read: {error.strerror or error}")
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            sign = self.last_sign  # values of another program; they must not end this thread
            trouble = run_events.short(f"its files can't be used: {error}")
        with self.lock:
            self.answered, self.last_sign = time.time(), sign
            changed |= trouble != self.trouble
            self.trouble = trouble
            self.version += changed
        return more

    @property
    def unreadable(self) -> int:
        """Returns the number of complete lines that are no JSON."""
        return sum(file.follow.unreadable for file in self._files)

    @property
    def torn(self) -> bool:
        """Returns True if one of the files ends in the middle of a line."""
        return any(file.follow.torn for file in self._files)

    @property
    def share_read(self) -> float:
        """Returns the share of the steps' file that has been read, 0 to 1."""
        return self._files[0].follow.share if self._files[0].follow.share else 1.0

    def standing(self, now: float | None = None) -> dict[str, Any]:
        """Returns the run's state; the lock must be taken."""
        now = time.time() if now is None else now
        try:
            numbers = run_numbers(self, now)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            copy = Run(self.name, self.folder)  # without numbers, with the error as its text
            copy.trouble = run_events.short(f"its files hold numbers that can't be shown: {error}")
            numbers = run_numbers(copy, now)
        return {k: number(v) if isinstance(v, float) else v for k, v in numbers.items()}

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
            self.events.add(Event("skipped", step, "gradients not finite: nothing moved", True))

    def _evaluation(self, line: Line) -> None:
        self.evaluations.add(number(line.get("step")) or 0, line)
        self.eval_data = number(line.get("eval_loss"))

    def _machine(self, line: Line) -> None:
        self.machine.add(number(line.get("step")) or 0, line)
        self.machine_last = line

    def _sample(self, line: Line) -> None:
        self.samples_read += 1
        texts = {name: lines_of(line.get(name), LONGEST_SAMPLE) for name in ("prompt", "answer")}
        self.samples.append({"step": number(line.get("step")), **texts})

    def _event(self, make: Callable[[Line], Event | None], line: Line) -> None:
        self.events.add(make(line))

    def _small_files(self) -> bool:
        start, summary = self.folder / "run.json", self.folder / "summary.json"
        changed = False
        if self._is_new(start):
            contents, before = run_events.read_object(start), run_events.earlier_plan(self.folder)
            with self.lock:
                changed, self.start = True, contents
                self.events.forget("plan")
                if before is not None:
                    self.events.add(run_events.of_plan(contents.get("plan"), before))
        if self._is_new(summary):
            contents = run_events.read_object(summary)
            with self.lock:
                changed, self.summary = True, contents
        report = self.folder / "report.html"
        if self._is_new(report):
            changed, page = True, run_events.read_bytes(report, LARGEST_REPORT)
            with self.lock:
                self.report = page
        stop_requested = os.path.lexists(self.folder / STOP_FILE)
        if stop_requested != self.stop_requested:
            changed, self.stop_requested = True, stop_requested
        for path in sorted((self.folder / "ranks").glob("*.json"))[:MOST_RANKS]:
            if self._is_new(path):
                contents = run_events.read_object(path)
                with self.lock:
                    changed, self.ranks[path.stem] = True, contents
        return changed

    def _is_new(self, path: Path) -> bool:
        """Returns True if a file was changed, created or removed since the last call."""
        try:
            stat = path.stat()
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            stamp = (0, 0, 0)
        before = self._stamps.get(path, (0, 0, 0))
        self._stamps[path] = stamp
        return stamp != before


class _File:
    """A followed file, the function for its lines, and the one that clears them."""

    def __init__(self, path: Path, take: Callable[[Line], None], anew: Callable[[], None]) -> None:
        self.follow, self.take, self.anew = FollowedFile(path), take, anew
        anew()


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
