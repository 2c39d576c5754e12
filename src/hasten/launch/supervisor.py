"""Starts the ranks of a run, one process each, watches them and ends them together.

After a failure it restarts them from the newest checkpoint, where restarts are allowed:

    attempt 1 -> a rank dies or hangs -> all ranks are killed -> attempt 2 -> ... ->
    done

Each attempt has its own folder for the rendezvous and the heartbeats. The run also ends if a
restart can't repair the failure, or if no restart is left. The
cause is printed once, with its rank, and is a line of ``restarts.jsonl``. A restart is
useful if the plan writes checkpoints: ranks are started with the option to resume from
the newest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hasten.core.health import append_line
from hasten.core.loop import ignore_stop_signals
from hasten.launch.ranks import rank_environment
from hasten.machine import environment as environment_
from hasten.machine.processes import (
    ATTEMPT,
    FOLDER,
    HeartbeatState,
    ended_by,
    read_exit_reason,
    read_heartbeat,
)
from hasten.machine.signals import HASTE, StopSignal, stop_signals


def _started(
    arguments: Sequence[str], variables: Mapping[str, str], log: Path | None
) -> subprocess.Popen[bytes]:
    """Starts ``python -m hasten ARGUMENTS``; its output goes to the log, if there is one."""
    with contextlib.ExitStack() as stack:
        out = None if log is None else stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            [sys.executable, "-m", "hasten", *arguments],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is None else subprocess.STDOUT,
            # Ctrl-C must reach only this process, which forwards it once to each rank.
            start_new_session=True,
        )


# One attempt. These events end it:
#
#     a rank ends with an error or is killed     seen within 20 ms
#     a rank writes an exit reason               the same, even if it then hangs
#     no heartbeat for ``limits.hang``           a rank hangs, and the others wait for it
#     no first heartbeat for ``limits.start``    a rank hangs while it starts or ends
#
# Then all ranks that still run are killed with their child processes. SIGTERM isn't enough for
# ranks that wait for each other. No file is lost, since saving is atomic.

LOOK_SECONDS = 0.02
SETTLE_SECONDS = 0.25  # wait after a first failure, since its cause may show a little later
GRACE_SECONDS = 10.0  # for the other ranks to end by themselves after rank 0
CONSEQUENCE = -signal.SIGABRT  # gloo aborts ranks that lost a peer: seldom the first cause


RankProcess = Any  # has what subprocess.Popen has: pid, poll, wait, send_signal, kill
StartRank = Callable[[int], RankProcess]


@dataclass(frozen=True)
class RankTimeouts:
    """Longest time without a heartbeat, in seconds: in training, and at start or end."""

    hang: float = 600.0
    start: float = 1800.0


@dataclass(frozen=True)
class AttemptResult:
    """The end of an attempt; ``rank`` is the one that caused it, if it can be detected."""

    code: int  # exit code of the rank; below 0: the signal that ended it
    rank: int | None = None
    cause: str = ""
    step: int = 0  # last step that a rank has finished
    trained: bool = False  # a step was finished in this attempt
    traceback: str = ""  # the rank's, if it wrote one
    hung: bool = False
    is_reported: bool = False  # the rank wrote the cause itself


class Attempt:
    """The ranks of one attempt; ``watch`` returns when all have ended."""

    def __init__(
        self,
        folder: Path,
        count: int,
        start: StartRank,
        limits: RankTimeouts,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.limits, self._leaving = folder, limits, leaving
        self.processes: list[RankProcess] = []
        self._began = time.monotonic()
        self._heartbeats = [
            (HeartbeatState(), self._began)
        ] * count  # each rank's heartbeat, and when it was new
        try:
            for rank in range(count):
                self.processes.append(start(rank))
        except BaseException:
            self.kill()
            raise

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all ranks that run."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def watch(self) -> AttemptResult:
        """Waits for the end of the attempt; no rank runs afterwards."""
        try:
            return self._ending()
        finally:
            self.kill()

    def _ending(self) -> AttemptResult:
        first_failure = done_at = None
        while True:
            now = time.monotonic()
            codes = [p.poll() for p in self.processes]
            if all(code == 0 for code in codes):
                return self._with(0)
            failed = any(codes) or any(read_exit_reason(self.folder, r) for r in range(len(codes)))
            if failed:
                first_failure = first_failure or now
                patience = GRACE_SECONDS if self._leaving() else SETTLE_SECONDS
                over = all(code is not None for code in codes)
                if over or now > first_failure + patience:
                    return self._failure(codes)
            elif codes[0] == 0:  # rank 0 has saved and reported: the run is complete
                done_at = done_at or now
                if now > done_at + GRACE_SECONDS:
                    return self._with(0)
            elif silent := self._silent(now, codes):
                return silent
            time.sleep(LOOK_SECONDS)

    def _failure(self, codes: Sequence[int | None]) -> AttemptResult:
        """Returns the first failure; a killed rank is a cause, other failures are consequences."""
        killed = [r for r, c in enumerate(codes) if c is not None and c < 0 and c != CONSEQUENCE]
        if killed:
            code = codes[killed[0]] or 0
            return self._with(code, killed[0], ended_by(code))
        reports = {r: w for r in range(len(codes)) if (w := read_exit_reason(self.folder, r))}
        if reports:
            rank = min(reports, key=lambda r: reports[r]["time"])
            report = reports[rank]
            code, line = report["code"], report["line"]
            return replace(self._with(code, rank, line, report["traceback"]), is_reported=True)
        rank, exit_code = next((r, c) for r, c in enumerate(codes) if c)
        cause = ended_by(exit_code) if exit_code < 0 else f"it ended with code {exit_code}"
        return self._with(exit_code, rank, cause)

    def _silent(self, now: float, codes: Sequence[int | None]) -> AttemptResult | None:
        """Returns the result of an attempt that hangs; None while all ranks have heartbeats."""
        # A rank that waits may be silent a little longer than the one that it waits for. So ranks
        # that are nearly late are examined too.
        late, nearly = False, list[int]()
        for rank, (before, since) in enumerate(self._heartbeats):
            beat = read_heartbeat(self.folder, rank)
            if beat.count != before.count:
                self._heartbeats[rank] = beat, now
                continue
            limit = self.limits.hang if beat.trains else self.limits.start
            if codes[rank] is None and now - since > limit - min(SETTLE_SECONDS, limit / 2):
                nearly.append(rank)
                late = late or now - since > limit
        if not late:
            return None
        hanging_rank, reason = self._stuck(nearly)
        beat = self._heartbeats[nearly[0]][0]
        cause = f"no step for {self.limits.hang:g} s"
        if not beat.trains:
            cause = f"not {'done' if beat.count else 'started'} after {self.limits.start:g} s"
        return self._with(1, hanging_rank, f"{cause}: {reason}", hung=True)

    def _stuck(self, late: Sequence[int]) -> tuple[int | None, str]:
        """Returns the rank that the others wait for, if it can be detected, and a reason."""
        for rank in late:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(self.processes[rank].pid).status() == psutil.STATUS_STOPPED:
                    return rank, "its process is stopped"
        steps = [self._heartbeats[rank][0].step for rank in late]
        behind = [rank for rank, step in zip(late, steps, strict=True) if step == min(steps)]
        if len(behind) == 1:
            return behind[0], f"it hangs after step {min(steps)}"
        return None, f"ranks {', '.join(map(str, late))} wait after step {min(steps)}"

    def _with(
        self,
        code: int,
        rank: int | None = None,
        cause: str = "",
        details: str = "",
        hung: bool = False,
    ) -> AttemptResult:
        beats = [read_heartbeat(self.folder, r) for r in range(len(self.processes))]
        step, count = max(b.step for b in beats), max(b.count for b in beats)
        return AttemptResult(code, rank, cause, step, count > 1, details, hung)

    def kill(self) -> None:
        """Kills all ranks that run, with their child processes, and waits for their end."""
        family: list[psutil.Process] = []
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    family += psutil.Process(process.pid).children(recursive=True)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
        for process in self.processes:
            process.wait()


FINAL = {0, 2, 3, 4, 5, 6, 75, 130}  # exit codes without a restart (docs/reference/metrics.md)
WORN_OUT = 7  # exit code if no restart is left


@dataclass(frozen=True)
class Supervision:
    """Limits of a supervisor.

    Args:
        max_restarts: attempts after the first.
        limits: how long ranks may be silent.
        fewest: smallest number of ranks to continue with, if the same rank fails twice in a
            row.
    """

    max_restarts: int
    limits: RankTimeouts = field(default_factory=RankTimeouts)
    fewest: int | None = None


@dataclass(frozen=True)
class SupervisedRanks:
    """The command of each rank: ``python -m hasten ARGUMENTS``.

    Args:
        arguments: function of the number of ranks, and of True if an attempt has trained.
            Then the run resumes from what it saved.
        environ: variables that a rank's plan needs before it starts; function of rank and
            number of ranks.
        count: ranks of the first attempt.
        cores: processor cores that all ranks share.
        launch: starts a rank with its variables and arguments; None: as a separate program.
    """

    arguments: Callable[[int, bool], Sequence[str]]
    environ: Callable[[int, int], Mapping[str, str]]
    count: int
    cores: int
    launch: Callable[[int, Mapping[str, str], Sequence[str]], RankProcess] | None = None


def supervise(
    ranks: SupervisedRanks, supervision: Supervision, folder: Path, log: Path | None = None
) -> int:
    """Runs attempts until the run is over, and returns the exit code.

    Raises:
        StopSignal: a stop signal came when no rank had anything to save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ranks-") as scratch:
        return _Supervisor(ranks, supervision, Path(scratch), log).run()


class _Supervisor:
    """The attempts of one run, one after the other."""

    def __init__(
        self, ranks: SupervisedRanks, supervision: Supervision, folder: Path, log: Path | None
    ):
        self._ranks, self._supervision, self._folder, self._log = ranks, supervision, folder, log
        self._devices = list(range(ranks.count))  # numbers of the devices in use: LOCAL_RANK
        self._running: Attempt | None = None
        self._stop_signal: signal.Signals | None = None
        self._trained = False  # in any attempt

    def run(self) -> int:
        number, failed_device = 1, None
        with self._forwarding_signals():
            while True:
                began = time.time()
                ending = self._attempt(number)
                self._trained |= ending.trained
                if self._stop_signal is not None and ending.code not in FINAL:
                    raise self._stopped(self._stop_signal)
                if ending.code in FINAL:
                    if ending.is_reported:  # once for all ranks, which don't print it
                        self._say(ending.cause)
                    elif ending.rank and ending.cause:  # rank 0 has printed its own message
                        self._say(self._sentence(ending))
                    return ending.code
                if self._log is not None:
                    times = {"attempt": number, "began": began, "ended": time.time()}
                    append_line(self._log, asdict(ending) | times)
                if number > self._supervision.max_restarts:
                    used = f"; {number - 1} restart(s) are used up" if number > 1 else ""
                    self._say(f"{self._sentence(ending)}{used}")
                    return ending.code if number == 1 and ending.code > 0 else WORN_OUT
                device = None if ending.rank is None else self._devices[ending.rank]
                again = (
                    self._fewer(device) if device is not None and device == failed_device else ""
                )
                failed_device = device
                self._say(
                    f"{self._sentence(ending)}; restart {number} of "
                    f"{self._supervision.max_restarts}{again}"
                )
                if self._stop_signal is not None:
                    raise self._stopped(self._stop_signal)
                number += 1

    def _stopped(self, number: signal.Signals) -> StopSignal:
        """Returns the exception for a signal that came when no rank had anything to save."""
        error = StopSignal(number.name)
        if self._trained:
            error.add_note("between two attempts: continue with resume=auto")
        return error

    def _attempt(self, number: int) -> AttemptResult:
        folder = self._folder / f"attempt-{number}"
        folder.mkdir()
        arguments = self._ranks.arguments(len(self._devices), self._trained)
        environments = [
            self._environment(rank, number, folder) for rank in range(len(self._devices))
        ]

        def start(rank: int) -> RankProcess:
            environment = environments[rank]
            if self._ranks.launch is not None:
                return self._ranks.launch(rank, environment, arguments)
            return _started(arguments, environment, self._log_of(rank))

        limits, leaving = self._supervision.limits, lambda: self._stop_signal is not None
        self._running = Attempt(folder, len(self._devices), start, limits, leaving)
        if self._stop_signal is not None:  # a signal during the start of ranks
            self._running.signal(self._stop_signal)
        try:
            return self._running.watch()
        finally:
            self._running = None

    def _environment(self, rank: int, number: int, folder: Path) -> dict[str, str]:
        count = len(self._devices)
        threads = max(1, self._ranks.cores // count)
        return {
            **rank_environment(rank, count, folder, threads),
            **self._ranks.environ(rank, count),
            "LOCAL_RANK": str(self._devices[rank]),
            FOLDER: str(folder),
            ATTEMPT: str(number),
            environment_.PARENT: str(os.getpid()),
            environment_.STARTED_FOR_PLAN: "1",
        }

    def _log_of(self, rank: int) -> Path | None:
        """Returns a rank's log file; None for rank 0, which prints to the terminal."""
        return self._folder / f"rank-{rank}.log" if rank else None

    def _fewer(self, device: int) -> str:
        """Removes a device that failed twice in a row, if the user allows it; returns a note."""
        fewest = self._supervision.fewest
        if fewest is None or len(self._devices) <= fewest:
            return ""
        self._devices.remove(device)
        return f", without device {device}: {len(self._devices)} rank(s)"

    def _sentence(self, ending: AttemptResult) -> str:
        who = "the ranks" if ending.rank is None else f"rank {ending.rank}"
        text = f"{who} failed after step {ending.step}: {ending.cause}"
        log = self._log_of(ending.rank or 0)
        has_reason = ending.is_reported or ending.hung or ending.code < 0
        if log is not None and log.exists() and not has_reason:
            lines = log.read_text(errors="replace").strip().splitlines()
            text += f" ({lines[-1]})" if lines else ""
        return f"{ending.traceback.rstrip()}\n{text}" if ending.traceback else text

    def _say(self, text: str) -> None:
        print(f"hasten: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """Context that forwards stop signals of this process to the ranks."""

        def forward(number: int, frame: object) -> None:
            self._stop_signal = signal.Signals(number)
            if self._running is not None:
                self._running.signal(self._stop_signal)

        before = [(number, signal.signal(number, forward)) for number in stop_signals()]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            if self._stop_signal in HASTE:  # further signals must not change the exit code
                ignore_stop_signals()
