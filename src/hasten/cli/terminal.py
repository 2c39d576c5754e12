"""What commands show: a live bar on a terminal, plain lines elsewhere, and the report's table."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hasten.formatting import duration, shown
from hasten.report.gains import arms_that_hurt
from hasten.report.page import render_markdown
from hasten.report.schema import read_report

PLAIN_EVERY_SECONDS = 10.0


class Display:
    """Tells what happens and how long the rest will take.

    On a terminal one line is redrawn; elsewhere a line is printed every ten seconds at most.
    """

    def __init__(self) -> None:
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._began = time.monotonic()
        self._printed = 0.0

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                console=self.console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, text: str) -> None:
        """One line that stays."""
        self.console.print(shown(text), markup=False)

    def begin(self) -> None:
        """What is shown from now on is a new piece of work, with an ETA of its own."""
        self._began = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
        self._task = None

    def show(self, text: str, share: float) -> None:
        """The state of a work of which ``share`` (0 to 1) is done."""
        eta = self._eta(share)
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=1.0, eta=eta)
            self._bar.update(self._task, description=text, completed=share, eta=eta)
        elif share >= 1 or time.monotonic() - self._printed >= PLAIN_EVERY_SECONDS:
            self._printed = time.monotonic()
            self.tell(f"{share:4.0%}  {text}  {eta}")

    def _eta(self, share: float) -> str:
        if share <= 0:
            return ""
        return "ETA " + duration((time.monotonic() - self._began) * (1 - share) / share)


# The report's table as a terminal shows it: a row that is slower than the row above it is red.


def print_table(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The report in short; where the output is no terminal, the same text without colour."""
    console = console or Console(highlight=False)
    red = arms_that_hurt(read_report(report)["arms"])
    for line in render_markdown(report).splitlines():
        name = line.split("|")[1].strip() if line.startswith("|") else None
        console.print(Text(line, "red" if name in red else ""), soft_wrap=True)
    console.print()
