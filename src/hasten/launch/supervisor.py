"""A supervisor starts the ranks of a run again when one dies or hangs, from the newest checkpoint.

    attempt 1 -> a rank dies or hangs -> all ranks are killed -> attempt 2, in a folder of its own:
    another meeting place, another pulse -> ... -> done, or an ending that a restart can't mend, or
    no restart left

What caused it is said once, with its rank, and is a line of ``restarts.jsonl``. A restart is of use
where the plan writes checkpoints; ranks are told to resume from the newest.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hasten.core.health import append_line
from hasten.launch.attempt import Attempt, Ending, Limits, Process
from hasten.launch.ranks import rank_environment
from hasten.launch.standby import Spares
from hasten.machine import environment as environment_
from hasten.machine.processes import ATTEMPT, FOLDER, PARENT

FINAL = {0, 2, 3, 4, 5, 6, 75, 130}  # exit codes that a restart can't better (docs/metrics.md)
LEFT = 75  # EX_TEMPFAIL of sysexits.h: saved, go on later
WORN_OUT = 7
LONGEST_PAUSE = 30.0  # seconds before a restart, where attempts end before their first step
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")


@dataclass(frozen=True)
class Supervision:
    """What a supervisor may do.

    Args:
        max_restarts: attempts after the first.
        limits: how long ranks may be silent.
        fewest: ranks to go on with at least, where one and the same fails twice in a row.
        spares: module that runs a waiting spare (:mod:`hasten.launch.standby`); None: no spares.
    """

    max_restarts: int
    limits: Limits = field(default_factory=Limits)
    fewest: int | None = None
    spares: str | None = None


@dataclass(frozen=True)
class Ranks:
    """What is run: ``python -m hasten ARGUMENTS`` for each rank.

    Args:
        arguments: of a number of ranks; and whether an attempt has trained, so that what it saved
            is to be gone on from.
        environ: variables that a rank's plan wants before it starts, of rank and number of ranks.
        count: ranks of the first attempt.
        cores: shared out between them.
        launch: starts one with its variables and arguments; None: as a program of its own.
    """

    arguments: Callable[[int, bool], Sequence[str]]
    environ: Callable[[int, int], Mapping[str, str]]
    count: int
    cores: int
    launch: Callable[[int, Mapping[str, str], Sequence[str]], Process] | None = None


def supervise(ranks: Ranks, supervision: Supervision, folder: Path, log: Path | None = None) -> int:
    """Run until the run is over; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ranks-") as place:
        return _Supervisor(ranks, supervision, Path(place), log).run()


class _Supervisor:
    """The attempts of one run, one after the other."""

    def __init__(self, ranks: Ranks, supervision: Supervision, place: Path, log: Path | None):
        self._ranks, self._supervision, self._place, self._log = ranks, supervision, place, log
        self._seats = list(range(ranks.count))  # local ranks, and so devices, that are in use
        self._running: Attempt | None = None
        self._asked: signal.Signals | None = None
        self._spares = Spares(supervision.spares) if supervision.spares else None
        self._trained = False  # in any attempt
        self._fruitless = 0  # attempts in a row that ended before their first step

    def run(self) -> int:
        number, failed_seat = 1, None
        with self._listening():
            while True:
                began = time.time()
                ending = self._attempt(number)
                self._trained |= ending.trained
                if self._asked is not None and ending.code not in FINAL:
                    return LEFT  # asked to leave, before there was anything to save
                if ending.code in FINAL:
                    self._tell_final(ending)
                    return ending.code
                self._note(ending, number, began)
                if number > self._supervision.max_restarts:
                    self._say(f"{_sentence(ending)}; {number - 1} restart(s) are used up")
                    return WORN_OUT
                seat = None if ending.rank is None else self._seats[ending.rank]
                again = self._fewer(seat) if seat is not None and seat == failed_seat else ""
                failed_seat = seat
                self._say(
                    f"{_sentence(ending)}; restart {number} of "
                    f"{self._supervision.max_restarts}{again}"
                )
                self._pause(ending)
                if self._asked is not None:
                    return LEFT
                number += 1

    def _attempt(self, number: int) -> Ending:
        folder = self._place / f"attempt-{number}"
        folder.mkdir()
        arguments = self._ranks.arguments(len(self._seats), self._trained)
        environments = [self._environment(rank, number, folder) for rank in range(len(self._seats))]

        def start(rank: int) -> Process:
            environment = environments[rank]
            if self._spares is not None:
                spare = self._spares.take(rank, environment, arguments)
                if spare is not None:
                    return spare
            return (self._ranks.launch or self._cold)(rank, environment, arguments)

        def begun() -> None:
            if self._spares is not None and number <= self._supervision.max_restarts:
                for rank, environment in enumerate(environments):
                    self._spares.prepare(rank, environment, self._words_of(rank))

        limits, leaving = self._supervision.limits, lambda: self._asked is not None
        self._running = Attempt(folder, len(self._seats), start, limits, leaving, begun)
        if self._asked is not None:  # while they were being started
            self._running.signal(self._asked)
        try:
            return self._running.watch()
        finally:
            self._running = None

    def _environment(self, rank: int, number: int, folder: Path) -> dict[str, str]:
        count = len(self._seats)
        threads = max(1, self._ranks.cores // count)
        return {
            **rank_environment(rank, count, folder, threads),
            **self._ranks.environ(rank, count),
            "LOCAL_RANK": str(self._seats[rank]),
            FOLDER: str(folder),
            ATTEMPT: str(number),
            PARENT: str(os.getpid()),
            environment_.STARTED_FOR_PLAN: "1",
        }

    def _words_of(self, rank: int) -> Path | None:
        """The first rank speaks to the user itself."""
        return self._place / f"rank-{rank}.log" if rank else None

    def _cold(
        self, rank: int, environment: Mapping[str, str], arguments: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "hasten", *arguments]
        log = self._words_of(rank)
        with contextlib.ExitStack() as stack:
            out = None if log is None else stack.enter_context(log.open("ab"))
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which tells each rank once.
                start_new_session=True,
            )

    def _fewer(self, seat: int) -> str:
        """Leave out the seat that failed twice in a row, where the user allows it."""
        fewest = self._supervision.fewest
        if fewest is None or len(self._seats) <= fewest:
            return ""
        self._seats.remove(seat)
        if self._spares is not None:
            self._spares.end()
        return f", without device {seat}: {len(self._seats)} rank(s)"

    def _pause(self, ending: Ending) -> None:
        """Longer and longer where attempts end before they begin; not at all where one trained."""
        self._fruitless = 0 if ending.trained else self._fruitless + 1
        if self._fruitless > 1:
            end = time.monotonic() + min(2.0 ** (self._fruitless - 2), LONGEST_PAUSE)
            while time.monotonic() < end and self._asked is None:
                time.sleep(0.05)

    def _note(self, ending: Ending, number: int, began: float) -> None:
        if self._log is not None:
            found = asdict(ending) | {"attempt": number, "began": began, "ended": time.time()}
            append_line(self._log, found)

    def _tell_final(self, ending: Ending) -> None:
        """What a rank has to say, once for all; it doesn't say it itself."""
        if ending.told:
            self._say(ending.cause)
        elif ending.rank and ending.cause:  # rank 0 has the user's ear
            self._say(_sentence(ending))

    def _say(self, text: str) -> None:
        print(f"hasten: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """What asks this process to leave asks the ranks."""

        def forward(number: int, frame: object) -> None:
            self._asked = signal.Signals(number)
            if self._running is not None:
                self._running.signal(self._asked)

        numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
        before = [(number, signal.signal(number, forward)) for number in numbers]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            if self._spares is not None:
                self._spares.end()


def _sentence(ending: Ending) -> str:
    who = "the ranks" if ending.rank is None else f"rank {ending.rank}"
    text = f"{who} failed after step {ending.step}: {ending.cause}"
    return f"{ending.words.rstrip()}\n{text}" if ending.words else text
