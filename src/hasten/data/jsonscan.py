"""The values of a JSON Lines file, one by one, each with its line; `jsonlist` reads lists.

A damaged record costs itself and nothing more, so neither file is handed to `json.loads` whole:

  (1) bytes become text with `surrogateescape`: a byte that isn't UTF-8 stays visible in its record
  (2) lines are split at newline bytes only (str.splitlines also splits at U+2028, legal in JSON);
      a list is read record by record with `raw_decode`
  (3) what JSON readers disagree about is a fault: NaN, infinity, integers beyond 64 bits, NUL, a
      byte order mark inside the file
  (4) after a syntax error in a list, reading goes on at the next object that looks like a record
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from hasten.data.containers import DamagedStreamError

_SPACE = re.compile(r"[ \t\r\n]*")
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1 << 26  # bytes
_INT_DIGITS = 20  # no 64-bit integer has more


class Found(NamedTuple):
    """A value, or the reason why the place holds none."""

    line: int  # the first is 1
    value: Any
    reason: str | None
    lost: bool = False  # all that follows in the file is lost too, however much that is


class FaultError(ValueError):
    """Why a stretch of text is not one sound value."""

    def __init__(self, reason: str, at: int = 0, unterminated: bool = False) -> None:
        super().__init__(reason)
        self.at = at  # the position where reading failed
        self.unterminated = unterminated  # it is the start of a string that has no end


def scan_lines(file: IO[bytes]) -> Iterator[Found]:
    """The records of a stream with one on each line; closes it. May raise OSError."""
    blank: list[int] = []  # blank lines are faults only if something follows them
    number = 0
    with file:
        try:
            for number, line, fault in _lines(file):
                text = line.removeprefix(_BOM) if number == 1 else line
                if fault:
                    yield Found(number, None, fault)
                elif not text.strip():
                    blank.append(number)
                else:
                    yield from (Found(empty, None, "an empty line") for empty in blank)
                    blank.clear()
                    yield _line(number, text.rstrip().decode("utf-8", "surrogateescape"))
        except DamagedStreamError as error:
            yield Found(number + 1, None, str(error), lost=True)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes, str | None]]:
    """Numbered lines, or why one can't be read; none longer than LONGEST_LINE is ever held."""
    number = 1
    while line := file.readline(LONGEST_LINE + 1):
        reason = None
        if len(line) > LONGEST_LINE:
            reason = f"a line longer than {LONGEST_LINE >> 20} MiB"
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
        yield number, line, reason
        number += 1


def _line(number: int, text: str) -> Found:
    decoder = Decoder()
    try:
        value, end = decoder.decode(text, _end(_SPACE, text, 0))
        if _end(_SPACE, text, end) < len(text):
            raise FaultError(f"more than one value on the line (column {end + 1})")
        decoder.check(text)
    except FaultError as fault:
        # A bad byte often breaks the syntax too; the byte is then the better reason.
        return Found(number, None, damage(text) or str(fault))
    return Found(number, value, None)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def damage(raw: str) -> str | None:
    """What makes a stretch of text unfit whatever its syntax says."""
    if bad := _BAD_BYTE.search(raw):
        return f"a byte that isn't UTF-8 (0x{ord(bad.group()) - 0xDC00:02x})"
    if "\x00" in raw:
        return "a NUL byte"
    if "\ufeff" in raw:
        return "a byte order mark inside the file"
    return None


class Decoder:
    """A JSON decoder that notes dubious literals instead of losing its place over them."""

    def __init__(self) -> None:
        self._dubious: str | None = None
        self._json = json.JSONDecoder(
            parse_constant=self._constant, parse_int=self._int, parse_float=self._float
        )

    def decode(self, text: str, at: int, before: int = 0) -> tuple[Any, int]:
        """The value that begins at `at` and where it ends; raises FaultError on a syntax error.

        `before` is what the text's first line has before the text, where that is part of a file.
        """
        self._dubious = None
        try:
            return self._json.raw_decode(text, at)
        except json.JSONDecodeError as error:
            unterminated = error.msg.startswith("Unterminated")
            cut = error.pos >= len(text) or unterminated
            reason = "truncated JSON" if cut else "not JSON"
            line = text.rfind("\n", 0, error.pos)
            column = error.pos - line + (before if line < 0 else 0)
            said = f"{reason}: {error.msg} (column {column})"
            raise FaultError(said, error.pos, unterminated) from None
        except RecursionError:
            raise FaultError("nested too deeply") from None

    def check(self, raw: str) -> None:
        """Raise FaultError if the value decoded last, or its text, holds what isn't allowed."""
        if reason := damage(raw) or self._dubious:
            raise FaultError(reason)

    def _constant(self, name: str) -> float:
        self._dubious = f"{name}, which is not JSON"
        return 0.0

    def _int(self, digits: str) -> int:
        # Counted first: Python refuses to read integers of more than 4,300 digits.
        if len(digits.lstrip("-")) <= _INT_DIGITS and -(2**63) <= int(digits) < 2**64:
            return int(digits)
        self._dubious = f"a number beyond 64 bits ({_short(digits)})"
        return 0

    def _float(self, digits: str) -> float:
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            self._dubious = f"a number beyond 64 bits ({_short(digits)})"
        return number


def _short(digits: str) -> str:
    return digits if len(digits) <= 24 else digits[:20] + "..."
