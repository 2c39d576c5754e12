"""Numbers, times and sizes as text, and foreign text made safe to print."""

from __future__ import annotations

import difflib
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def duration(seconds: float) -> str:
    """Returns seconds as ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def size(count: float) -> str:
    """Returns bytes as ``1.9 GB`` or ``640 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def count_text(count: float) -> str:
    """Returns a number of weights as ``3.4 M``; below a million, all digits."""
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,.0f}"


def number(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None; true and false are no numbers."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # JSON integers may have any length
        return None
    return as_float if math.isfinite(as_float) else None


def numbers_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the finite numbers under a key; rows without one are left out."""
    return [read for row in rows if (read := number(row.get(key))) is not None]


NOT_MEASURED = "not measured"


# Text for reports: numbers as people read them, and JSON as readable YAML.
#
# Byte units are decimal (GB and MB), as on the command line, so a run shows the same number
# everywhere.

_LARGEST = 1e18  # larger numbers are written with an exponent and without a unit

UNITS: dict[str, Callable[[float], str]] = {
    "amount": lambda v: f"{v:,.0f}" if abs(v) >= 99.95 else f"{v:.3g}",
    "times": lambda v: f"{v:.2f}×",
    "memory": lambda v: f"{v / 1e9:.2f} GB" if v >= 1e9 else f"{v / 1e6:.0f} MB",
    "loss": lambda v: f"{v:.4f}",
    "loss_change": lambda v: signed(v, 4),
    "seconds": lambda v: f"{v:.2f} s" if v >= 1 else _milliseconds(1000 * v),
    "duration": lambda v: _duration(v),
    "percent": lambda v: f"{100 * v:.1f} %",
    "change": lambda v: f"{signed(100 * v, 1)} %",
    "tokens": lambda v: f"{v / 1e6:.3g} M" if v >= 1e5 else f"{v:,.0f}",
    "price": lambda v: f"{v:,.4f}",
    "short": lambda v: f"{v:.3g}",
    "measured": lambda v: f"{v:.4g}",
}


def number_text(value: float | None, unit: str) -> str:
    """Returns a number as people read it; None becomes a word, never a number."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    return UNITS[unit](value) if abs(value) < _LARGEST else f"{value:.3g}"


def measure(value: float | None, unit: str) -> str:
    """Returns a number in the unit of a prediction: s, bytes, or any other."""
    kind = {"s": "seconds", "bytes": "memory"}.get(unit)
    if kind or value is None or not math.isfinite(value):
        return number_text(value, kind or "amount")
    return f"{number_text(value, 'amount')} {unit}"


def signed(value: float, places: int) -> str:
    """Returns a change with its sign; zero after rounding has none."""
    text = f"{value:+.{places}f}".replace("-", "−")
    return text if re.search("[1-9]", text) else text[1:]


def span(value: Mapping[str, float | None], unit: str) -> str:
    """Returns a median with its interval, as in 1.62× [1.55, 1.70].

    A single round has none, nor has a baseline against itself.
    """
    low, high = value["low"], value["high"]
    if value["median"] is None or low is None or high is None or low == high:
        return number_text(value["median"], unit)
    ends = (number_text(end, unit).rstrip("×") for end in (low, high))
    return f"{number_text(value['median'], unit)} [{', '.join(ends)}]"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
    return "\n".join(line.rstrip() for line in lines)


def fitted(rows: Sequence[Sequence[str]], width: int) -> str:
    """Returns a table of at most ``width`` characters, its head first.

    While it is too wide, its widest column moves to a second line below each row, with its title.
    """
    columns = list(range(len(rows[0])))
    moved: list[int] = []
    while len(columns) > 2 and _width([[row[c] for c in columns] for row in rows]) > width:
        widest = max(columns[1:], key=lambda c: max(len(row[c]) for row in rows))
        columns.remove(widest)
        moved.append(widest)
    lines = aligned([[row[c] for c in columns] for row in rows]).splitlines()
    if not moved:
        return "\n".join(lines)
    table_lines = [lines[0]]
    for line, row in zip(lines[1:], rows[1:], strict=True):
        second = ", ".join(f"{rows[0][c]} {row[c]}".strip() for c in sorted(moved) if row[c])
        table_lines += [line, *([wrapped(f"     {second}", width)] if second else [])]
    return "\n".join(table_lines)


def wrapped(text: str, width: int) -> str:
    """Returns lines of at most ``width`` characters; a continued line is indented by two more."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        lines += (
            textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
            if len(line) > width
            else [line]
        )
    return "\n".join(lines)


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(map(len, aligned(rows).splitlines()))


def _milliseconds(count: float) -> str:
    """Returns milliseconds; a time of microseconds must not look like zero."""
    return f"{count:.2g} ms" if 0 < abs(count) < 9.5 else f"{count:.0f} ms"


def _duration(seconds: float) -> str:
    if abs(seconds) < 90:
        return UNITS["seconds"](seconds)
    return f"{seconds / 60:.0f} min" if abs(seconds) < 5400 else f"{seconds / 3600:,.1f} h"


def outline(value: Any, indent: str = "") -> str:
    """Returns a JSON object or list, not empty, as YAML with one line per value."""
    items = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    lines = []
    for key, item in items:
        head = indent + ("-" if key is None else f"{_scalar(key)}:")
        if isinstance(item, dict | list) and item:
            lines += [head, outline(item, indent + "  ")]
        else:
            lines.append(f"{head} {_scalar(item)}")
    return "\n".join(lines)


def flow(plain: Any) -> str:
    """Returns a JSON value as YAML on one line."""
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{_scalar(k)}: {flow(v)}" for k, v in plain.items()) + "}"
    return f"[{', '.join(map(flow, plain))}]" if isinstance(plain, list) else _scalar(plain)


def _scalar(value: Any) -> str:
    """Returns one value in YAML: JSON, without quotes if a word is unambiguous."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value, re.ASCII):
        meant = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
        return f'"{value}"' if value.lower() in meant else value
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 reads 1e-05 as text; with a point it is a number everywhere.
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Returns `` (did you mean 'x'?)`` if an option is similar, else an empty string."""
    near = difflib.get_close_matches(str(word), list(options), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def one_line(error: BaseException, most: int = 200) -> str:
    """Returns an error's text on one line of at most so many characters, or its type.

    A longer text ends after a whole word, with three dots.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 4].rsplit(' ', 1)[0]} ..."


# Foreign text: terminals must not execute it.

# Control characters, line ends of Unicode, and marks that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Returns the text with control characters other than tabs and line ends as `\x1b`."""

    def code(match: re.Match[str]) -> str:
        number = ord(match.group())
        return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"

    return _CONTROL.sub(code, text)
