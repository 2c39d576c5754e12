"""Alerts: conditions of a run that are reported once, by a command of the user.

    stall: no step for a long time (or not even a first one) in a run that should train
    nan: a step's loss or gradients weren't finite
    slow_rank: a rank takes 1.5 times as long as the others for data, copy and forward
    disk: the disk of the run's folder has little free space
    ended: the run's process has ended without a summary

The command is a list of arguments. The sentence is added as the last argument. It runs
without a shell, so a run's name can't become a command. An alert is repeated only if its
cause has disappeared in between.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.errors import InputError
from hasten.formatting import duration, number
from hasten.monitor.run import Run

KINDS = ("stall", "nan", "slow_rank", "disk", "ended")
COMMAND_SECONDS = 30.0  # time limit of the command
WAITING = 100  # alerts that wait for the command; more are dropped, with a message
Say = Callable[[str], None]


@dataclass(frozen=True)
class AlertLimits:
    """The limits of alerts."""

    stall_seconds: float = 300.0  # time without a step
    stall_steps: float = 20.0  # the same in median steps; the longer time counts
    slow_rank: float = 1.5  # ratio to the other ranks' median time
    disk_bytes: float = 5e9  # free bytes


@dataclass(frozen=True)
class Alert:
    """A condition to report."""

    run: str
    kind: str
    text: str


class Alerts:
    """Checks a run after each read, and passes new alerts to ``give``."""

    def __init__(self, give: Callable[[Alert], None], limits: AlertLimits | None = None) -> None:
        self._give, self._limits = give, limits or AlertLimits()
        self._active: set[tuple[str, str]] = set()
        self._skipped: dict[str, int] = {}
        self._lock = threading.Lock()

    def look(self, run: Run, now: float | None = None) -> None:
        """Compares the run's state with the limits."""
        now = time.time() if now is None else now
        with run.lock:
            standing, began = run.standing(now), number(run.start.get("began"))
        with self._lock:
            causes = self._causes(run.name, standing, began, now)
            for kind in KINDS:
                key, cause = (run.name, kind), causes.get(kind)
                if cause is None:
                    self._active.discard(key)
                elif key not in self._active:
                    self._active.add(key)
                    self._give(Alert(run.name, kind, f"{kind}: {run.name}: {cause}"))

    def _causes(
        self, name: str, standing: dict[str, Any], began: float | None, now: float
    ) -> dict[str, str]:
        causes = {}
        status, limits = standing["status"], self._limits
        if status in ("starting", "running", "silent"):
            patience = max(
                limits.stall_seconds, limits.stall_steps * (standing["step_seconds_median"] or 0.0)
            )
            sign = standing["last_sign"] or began
            if sign is not None and now - sign > patience:
                causes["stall"] = f"no step for {duration(now - sign)}"
            free = standing["disk_free_bytes"]
            if free is not None and free < limits.disk_bytes:
                causes["disk"] = f"{free / 1e9:.1f} GB are free where it writes"
            ratio = standing["slowest_rank_ratio"]
            if ratio is not None and ratio > limits.slow_rank:
                causes["slow_rank"] = (
                    f"rank {standing['slowest_rank']} takes {ratio:.1f} times as long as the others"
                )
        before = self._skipped.get(name)
        if status != "reading":  # no alert for steps skipped before the monitor started
            self._skipped[name] = standing["skipped_steps"]
            if before is not None and standing["skipped_steps"] > before:
                step = standing["step"]  # another program's file may lack the key
                which = "a step" if step is None else f"step {step:.0f} or one before it"
                causes["nan"] = f"{which} wasn't finite"
        if status == "ended":
            causes["ended"] = standing["words"]
        return causes


class Command:
    """Runs a command for each alert, one at a time, in a thread."""

    def __init__(self, arguments: Sequence[str], say: Say | None = None) -> None:
        self._arguments = list(arguments)
        self._say = say or (lambda text: print(f"hasten monitor: {text}", file=sys.stderr))
        self._waiting: queue.Queue[Alert] = queue.Queue(WAITING)
        threading.Thread(target=self._work, daemon=True, name="alerts").start()

    def __call__(self, alert: Alert) -> None:
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._say(f"alerts come faster than {self._arguments[0]!r} takes them: one was dropped")

    def wait(self) -> None:
        """Waits until the command has run for all alerts so far."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            alert = self._waiting.get()
            try:
                text = "".join(c if c.isprintable() else " " for c in alert.text)
                try:
                    subprocess.run(
                        [*self._arguments, text],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        timeout=COMMAND_SECONDS,
                        check=True,
                    )
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    self._say(f"the alert {alert.kind!r} was not given: {error}")
            finally:
                self._waiting.task_done()


def checked_command(value: object) -> list[str]:
    """Returns a command as a list of texts.

    Raises:
        InputError: ``value`` isn't a list of texts.
    """
    arguments = value if isinstance(value, list) else []
    if (
        arguments
        and arguments[0]
        and all(isinstance(word, str) and "\0" not in word for word in arguments)
    ):
        return arguments
    raise InputError(
        f"--alert is {value!r}; give the command as a list, the sentence is put behind it: "
        '\'["notify-send", "hasten"]\''
    )
