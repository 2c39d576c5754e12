"""The report's table as a terminal shows it: a row that is slower than the row above it is red."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hasten.report.gains import arms_that_hurt
from hasten.report.page import render_markdown
from hasten.report.schema import read_report


def print_table(report: Mapping[str, Any], console: Console | None = None) -> None:
    """The report in short; where the output is no terminal, the same text without colour."""
    console = console or Console(highlight=False)
    red = arms_that_hurt(read_report(report)["arms"])
    for line in render_markdown(report).splitlines():
        name = line.split("|")[1].strip() if line.startswith("|") else None
        console.print(Text(line, "red" if name in red else ""), soft_wrap=True)
    console.print()
