"""Signals that stop a command, with one sentence and a documented exit code at any time.

(1) While the command line is imported, the handler ends the process: there is nothing to close.
(2) In a command the handler raises an exception, so files are closed and processes ended.
(3) From its first step to its end a training handles the signals itself (`hasten.core.loop`).

Ranks that hasten starts keep the default action for (1) and (2): their parent prints the sentence.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Final, NoReturn

from hasten.errors import INTERRUPTED, LEFT
from hasten.machine.environment import started_by_hasten, world

# Signals that schedulers send before they take a machine away (Slurm sends SIGUSR1 on request), and
# the signal of a closed terminal.
HASTE: Final = tuple(
    getattr(signal, n) for n in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, n)
)
INTERRUPT: Final = signal.SIGINT.name
REPEAT_SECONDS = 5.0  # time in which a repeated signal is ignored; schedulers send some twice


class StopSignal(KeyboardInterrupt):
    """Raised when the signal of this name arrives.

    Ctrl-C raises it, too. If a plain KeyboardInterrupt leaves an `exec` of a text, as in
    dataclasses, Python ends by SIGINT. Then the exit code is lost (Python 3.11).
    """


def stop_sentence(name: str) -> str:
    """Returns the sentence for a command that the signal ended."""
    return "hasten: interrupted" if name == INTERRUPT else f"hasten: ended by {name}"


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a command, without those ignored at the process's start.

    ``nohup`` ignores SIGHUP; a shell's script ignores SIGINT for what it runs in the background.
    """
    return [n for n in (signal.SIGINT, *HASTE) if signal.getsignal(n) is not signal.SIG_IGN]


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Returns the interrupt that caused ``error``: libraries turn it into an ImportError."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, KeyboardInterrupt):
        link = link.__cause__ if link.__suppress_context__ else link.__context__
    return link


def report_stop(error: KeyboardInterrupt) -> int:
    """Prints the sentence for a command that ``error`` ended; returns the exit code.

    The exception's notes, which name the phase of the command, follow the sentence. Of several
    ranks the first one prints.
    """
    name = str(error) if isinstance(error, StopSignal) else INTERRUPT
    if world().is_main:
        notes = getattr(error, "__notes__", ())
        print(" ".join([stop_sentence(name), *notes]), file=sys.stderr)
    return _code(name)


def _code(name: str) -> int:
    return INTERRUPTED if name == INTERRUPT else LEFT


def install_exit_handlers() -> bool:
    """Makes a signal print its sentence and end this process.

    Signals that the process was started to ignore stay ignored; False if Ctrl-C is among them.
    """
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(number: int, frame: FrameType | None) -> NoReturn:
        name = signal.Signals(number).name
        os.write(2, f"{stop_sentence(name)}\n".encode())
        os._exit(_code(name))

    if interruptible:
        signal.signal(signal.SIGINT, end)
    if not started_by_hasten():
        for number in HASTE:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
    return interruptible


def raise_in_command(interruptible: bool) -> None:
    """Makes a signal raise `StopSignal`.

    A scheduler's signal within ``REPEAT_SECONDS`` of the same signal is ignored.

    Args:
        interruptible: returned by `install_exit_handlers`.
    """
    arrived: dict[int, float] = {}
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != process:  # a forked child: its parent ends it and prints the sentence
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        now = time.monotonic()
        is_repeated = now - arrived.get(number, -REPEAT_SECONDS) < REPEAT_SECONDS
        if name == INTERRUPT or not is_repeated:
            arrived[number] = now
            raise StopSignal(name)

    if interruptible:
        signal.signal(signal.SIGINT, stop)
    if not started_by_hasten():
        for number in HASTE:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)
