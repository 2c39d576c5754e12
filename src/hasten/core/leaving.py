"""Leaving between two steps: on Ctrl-C, on a scheduler's signal, on a notice of the machine's end.

    Ctrl-C (SIGINT)       the step is finished, state and model are saved; a second one ends at once
    SIGTERM, SIGUSR1      the same in haste: no evaluation, no samples; more of them change nothing
    a notice              as SIGTERM: a file that appears, or a command that ends with code 0

Schedulers repeat themselves and send SIGKILL after a grace time, so that saving must not be ended
by the second SIGTERM and must not wait for an evaluation. SIGUSR1 is what Slurm sends ahead of time
(``--signal=USR1@120``). A cloud announces the end of a spot machine where a command can ask.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from hasten.core.session import Session

HASTE = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGUSR1") if hasattr(signal, n))
COMMAND_SECONDS = 30.0  # a command of a notice that takes longer says nothing


def ask_to_leave(session: Session, haste: bool) -> None:
    """Stop after this step, on all ranks; ``haste``: the machine goes away."""
    session.leaving = session.leaving or haste
    session.stop_requested = True


@contextlib.contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Signals ask for a stop between two steps; a second Ctrl-C acts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread alone
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, *HASTE)}

    def ask(number: int, frame: object) -> None:
        ask_to_leave(session, haste=number != signal.SIGINT)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def patient(session: Callable[[], Session | None]) -> Iterator[None]:
    """Around a whole run: while one leaves and saves, a scheduler's signals change nothing.

    Before its first step and after a run that wasn't asked, they act as they did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in HASTE}

    def hear(number: int, frame: object) -> None:
        found = session()
        if found is not None and found.leaving:
            return
        signal.signal(number, before[signal.Signals(number)])
        signal.raise_signal(number)

    for number in before:
        signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asked(session: Session) -> tuple[bool, bool]:
    """Whether any rank was asked to stop, and whether in haste; every rank calls it at the end."""
    mine = torch.tensor([session.stop_requested, session.leaving], dtype=torch.float64)
    stop, haste = session.setup.layout.sum(mine).tolist()
    session.leaving = session.leaving or bool(haste)
    return bool(stop), bool(haste)


class Notice:
    """Watches, in a thread, for the news that this machine goes away.

    Args:
        file: leave as soon as it is there.
        command: leave as soon as it ends with code 0; a program and its arguments, no shell.
        every: seconds between two looks.
    """

    def __init__(
        self,
        on_notice: Callable[[], None],
        file: Path | None = None,
        command: Sequence[str] = (),
        every: float = 5.0,
    ) -> None:
        self._on_notice, self._file, self._command = on_notice, file, tuple(command)
        self._every, self._over = every, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice", daemon=True)

    def __enter__(self) -> Notice:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def there(self) -> bool:
        """Look now."""
        if self._file is not None and os.path.exists(self._file):  # unlike Path's, never raises
            return True
        if not self._command:
            return False
        try:
            done = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _watch(self) -> None:
        while not self._over.is_set():
            if self.there():
                self._on_notice()
                return
            self._over.wait(self._every)
