"""One attempt at a run: its ranks from their start to the end of the last one, watched.

    a rank ends with an error, is killed       seen at the next look (20 ms)
    a rank leaves last words                   the same, even if it then hangs
    no pulse for ``hang_seconds``              a rank hangs, and the others wait for it
    no first pulse for ``start_seconds``       a rank doesn't find its way in (or, at the end, out)

Whatever it was, all ranks that still run are then killed, with what they have started: SIGTERM
would wait for ranks that wait for each other. What they have saved appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from hasten.machine.processes import Beat, ended_by, read_pulse, read_words

LOOK_SECONDS = 0.02
SETTLE_SECONDS = 0.25  # after a first failure, for the one that caused it to show
GRACE_SECONDS = 10.0  # for the others to end by themselves once rank 0 is done
CONSEQUENCE = -signal.SIGABRT  # gloo aborts ranks whose peer is gone: seldom the first cause


class Process(Protocol):
    """What is asked of a rank's process; subprocess.Popen has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


StartRank = Callable[[int], Process]


@dataclass(frozen=True)
class Limits:
    """How long a rank may be silent, in seconds."""

    hang: float = 600.0
    start: float = 1800.0


@dataclass(frozen=True)
class Ending:
    """How an attempt ended; ``rank`` is the one that caused it, where it can be told."""

    code: int  # exit code of the rank; below 0: the signal that ended it
    rank: int | None = None
    cause: str = ""
    step: int = 0  # the furthest step that any rank has finished
    trained: bool = False  # a step was finished in this attempt
    words: str = ""  # a traceback, where there is one
    hung: bool = False
    told: bool = False  # the cause is in the rank's own words


class Attempt:
    """Ranks that run; ``watch`` returns when all have ended."""

    def __init__(
        self,
        folder: Path,
        count: int,
        start: StartRank,
        limits: Limits,
        leaving: Callable[[], bool] = lambda: False,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.limits, self._leaving = folder, limits, leaving
        self._begun: Callable[[], None] | None = begun  # once all ranks have shown a pulse
        self.processes: list[Process] = []
        self._began = time.monotonic()
        self._seen = [(Beat(), self._began)] * count  # each rank's pulse, and when it was new
        try:
            for rank in range(count):
                self.processes.append(start(rank))
        except BaseException:
            self.kill()
            raise

    def signal(self, number: signal.Signals) -> None:
        """To all ranks that run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def watch(self) -> Ending:
        """Until the attempt is over, one way or the other; no rank runs after it."""
        try:
            ending = self._ending()
        finally:
            self.kill()
        return ending

    def _ending(self) -> Ending:
        first_failure = done_at = None
        while True:
            now = time.monotonic()
            codes = [p.poll() for p in self.processes]
            if all(code == 0 for code in codes):
                return self._with(0)
            failed = any(codes) or any(self._words(rank) for rank in range(len(codes)))
            if failed:
                first_failure = first_failure or now
                patience = GRACE_SECONDS if self._leaving() else SETTLE_SECONDS
                over = all(code is not None for code in codes)
                if over or now > first_failure + patience:
                    return self._failure(codes)
            elif codes[0] == 0:  # it saves and reports, so that nothing more is to be had
                done_at = done_at or now
                if now > done_at + GRACE_SECONDS:
                    return self._with(0)
            elif silent := self._silent(now, codes):
                return silent
            if self._begun is not None and all(beat.count for beat, _ in self._seen):
                begun, self._begun = self._begun, None
                begun()
            time.sleep(LOOK_SECONDS)

    def _failure(self, codes: Sequence[int | None]) -> Ending:
        """The rank that ended first of all: killed ones before those that complain of it."""
        killed = [r for r, c in enumerate(codes) if c is not None and c < 0 and c != CONSEQUENCE]
        if killed:
            return self._killed(killed[0], codes[killed[0]] or 0)
        told = {r: w for r in range(len(codes)) if (w := self._words(r)) is not None}
        if told:
            rank = min(told, key=lambda r: told[r]["time"])
            found = told[rank]
            code, line = found["code"], found["line"]
            return replace(self._with(code, rank, line, found["traceback"]), told=True)
        rank, left = next((r, c) for r, c in enumerate(codes) if c)
        if left < 0:
            return self._killed(rank, left)
        return self._with(left, rank, f"it ended with code {left}")

    def _killed(self, rank: int, code: int) -> Ending:
        return self._with(code, rank, ended_by(code))

    def _silent(self, now: float, codes: Sequence[int | None]) -> Ending | None:
        """The ending where a rank shows no pulse for too long."""
        late, nearly = False, []  # who waits for a rank may have waited a little longer than it
        for rank, (before, since) in enumerate(self._seen):
            beat = read_pulse(self.folder, rank)
            if beat.count != before.count:
                self._seen[rank] = beat, now
                continue
            limit = self.limits.hang if beat.trains else self.limits.start
            if codes[rank] is None and now - since > limit - min(SETTLE_SECONDS, limit / 2):
                nearly.append(rank)
                late = late or now - since > limit
        if not late:
            return None
        who, how = self._stuck(nearly)
        beat = self._seen[nearly[0]][0]
        cause = f"no step for {self.limits.hang:g} s"
        if not beat.trains:
            cause = f"not {'done' if beat.count else 'started'} after {self.limits.start:g} s"
        return self._with(1, who, f"{cause}: {how}", hung=True)

    def _stuck(self, late: Sequence[int]) -> tuple[int | None, str]:
        """Of ranks that wait for each other, the one that is waited for, if it can be told."""
        stopped = [rank for rank in late if _is_stopped(self.processes[rank].pid)]
        if stopped:
            return stopped[0], "its process is stopped"
        steps = [self._seen[rank][0].step for rank in late]
        behind = [rank for rank, step in zip(late, steps, strict=True) if step == min(steps)]
        if len(behind) == 1:
            return behind[0], f"it hangs after step {min(steps)}"
        return None, f"ranks {', '.join(map(str, late))} wait after step {min(steps)}"

    def _words(self, rank: int) -> dict[str, Any] | None:
        return read_words(self.folder, rank)

    def _with(
        self,
        code: int,
        rank: int | None = None,
        cause: str = "",
        words: str = "",
        hung: bool = False,
    ) -> Ending:
        beats = [read_pulse(self.folder, r) for r in range(len(self.processes))]
        step, count = max(b.step for b in beats), max(b.count for b in beats)
        return Ending(code, rank, cause, step, count > 1, words, hung)

    def kill(self) -> None:
        """End all ranks that run, with what they started, at once; wait until they are gone."""
        family = [child for process in self.processes for child in _children(process)]
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
        for process in self.processes:
            process.wait()


def _children(process: Process) -> list[psutil.Process]:
    if process.poll() is not None:
        return []
    with contextlib.suppress(psutil.Error):
        found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
        return found
    return []


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
