"""Tables and foreign texts as Markdown and HTML: the only writer of both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

LONGEST = 400  # characters of a cell


def cell(text: object) -> str:
    """Returns text for a Markdown cell: on one line, with Markdown's characters escaped."""
    line = " ".join(str(text).split())
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
    escaped = re.sub(r"([\\|`*<>\[\]])", r"\\\1", line) or "–"
    # An interval is no link, and is easier to read without backslashes.
    return re.sub(r"\\\[([\d.,]+, [\d.,]+|95 %)\\\](?!\()", r"[\1]", escaped)


def code(text: object) -> str:
    """Returns text as Markdown's code, on one line."""
    return f"`{' '.join(str(text).split()).replace('`', '')}`"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of Markdown cells, the head first; columns are aligned for terminals."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * width for width in widths], *rows[1:]]
    padded = ([c.ljust(n) for c, n in zip(row, widths, strict=True)] for row in lines)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns rows of plain texts as a table of HTML, in a box that scrolls if it is too wide."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(head, "th")}{body}</table></div>'


def html_page(title: str, body: str) -> str:
    """Returns a complete page in the style of reports; ``body`` is HTML."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    return environment.get_template("page/plain.html.jinja").render(title=title, body=body)
