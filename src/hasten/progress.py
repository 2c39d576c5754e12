"""Progress reports: lines that stay, and a state with the completed share."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hasten.formatting import duration, shown

PLAIN_EVERY_SECONDS = 10.0
DRAWN_EVERY_SECONDS = 0.1


class Audience(Protocol):
    """Receives the progress of an experiment; `Display` is one.

    A line that stays goes to ``tell``. A new piece of work starts with ``begin``. Its state goes to
    ``show``, with the share (0 to 1) that is done. The seconds ``remaining`` are given if they
    don't follow from the share.
    """

    def tell(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def show(self, text: str, share: float, remaining: float | None = None) -> None: ...


class SilentProgress:
    """Shows nothing; ``tell`` receives the lines that stay, if it is given."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell

    def tell(self, text: str) -> None:
        self._tell(text)

    def begin(self) -> None: ...
    def show(self, text: str, share: float, remaining: float | None = None) -> None: ...


class _Console(Console):
    """A console that continues if its reader has ended; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Continues without output."""


class Display:
    """Displays progress and the remaining time.

    On a terminal one line is redrawn; elsewhere a line is printed every ten seconds at most.

    Args:
        by_thread: a thread redraws the line, so that its clock runs while nothing is shown. False
            where processes may be forked meanwhile, which could inherit a lock of that thread.
    """

    def __init__(self, by_thread: bool = True) -> None:
        self._by_thread = by_thread
        self.console = _Console(
            file=sys.stderr, highlight=False, soft_wrap=True, markup=False, emoji=False
        )
        self._bar: Progress | None = None
        self._task: Any = None
        self._began = time.monotonic()
        self._printed = 0.0

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}", markup=False),
                console=self.console,
                transient=True,
                auto_refresh=self._by_thread,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, text: str) -> None:
        """Prints one line that stays; a full log ends no work."""
        with contextlib.suppress(OSError):
            self.console.print(shown(text))

    def begin(self) -> None:
        """Begins a new piece of work, with an ETA of its own."""
        self._began = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
        self._task = None

    def show(self, text: str, share: float, remaining: float | None = None) -> None:
        """Shows the state of a work of which ``share`` (0 to 1) is done."""
        if remaining is None and share > 0:
            remaining = (time.monotonic() - self._began) * (1 - share) / share
        eta = "" if remaining is None else f"ETA {duration(remaining)}"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=1.0, eta=eta)
            self._bar.update(self._task, description=text, completed=share, eta=eta)
            if not self._by_thread and time.monotonic() - self._printed >= DRAWN_EVERY_SECONDS:
                self._printed = time.monotonic()
                self._bar.refresh()
        elif share >= 1 or time.monotonic() - self._printed >= PLAIN_EVERY_SECONDS:
            self._printed = time.monotonic()
            self.tell(f"{share:4.0%}  {text}  {eta}")
