"""Reads the values of a JSON Lines file or of a JSON list one by one, with their lines.

A damaged example affects only itself, so neither file is parsed whole by `json.loads`:

  (1) bytes become text with `surrogateescape`: a byte that isn't UTF-8 stays visible in
      its example.
  (2) lines are split at newline bytes only (str.splitlines also splits at U+2028, legal
      in JSON). A list is read example by example with `raw_decode`.
  (3) values that JSON readers treat differently are faults: NaN, infinity, integers
      beyond 64 bits, NUL.
  (4) after a syntax error in a list, reading continues at the next object that looks
      like an example.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from hasten.data.containers import DamagedStreamError
from hasten.errors import InputError
from hasten.foreign_files import DEEPEST, duplicate_reason, is_too_deep

_SPACE = re.compile(r"[ \t\r\n]*")
_BAD_BYTE = re.compile("[\udc80-\udcff]")
_BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1 << 26  # bytes
_INT_DIGITS = 20  # no 64-bit integer has more


class JsonValue(NamedTuple):
    """A value, or the reason why there is none."""

    line: int  # the first is 1
    value: Any
    reason: str | None
    lost: bool = False  # the rest of the file can't be read


class FaultError(ValueError):
    """The reason why a text isn't a valid value."""

    def __init__(self, reason: str, at: int = 0, unterminated: bool = False) -> None:
        super().__init__(reason)
        self.at = at  # the position where reading failed
        self.unterminated = unterminated  # True if a string has no end


def scan_lines(file: IO[bytes]) -> Iterator[JsonValue]:
    """Yields the examples of a stream with one on each line; closes it. May raise OSError.

    Empty lines are ignored, as in `datasets` with pyarrow.
    """
    for number, line, fault, lost in _lines(file):
        if fault:
            yield JsonValue(number, None, fault, lost)
        elif line.strip():
            yield _line(number, line.rstrip().decode("utf-8", "surrogateescape"))


def scan_texts(file: IO[bytes]) -> Iterator[JsonValue]:
    """Yields the non-empty lines of a stream as examples; closes it. May raise OSError."""
    for number, line, fault, lost in _lines(file):
        text = line.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")
        if reason := fault or damage(text):
            yield JsonValue(number, None, reason, lost)
        elif text.strip():
            yield JsonValue(number, {"text": text}, None)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes, str | None, bool]]:
    """Yields numbered lines, or why one can't be read, and True if the rest of the file is lost.

    It closes the file at the end.
    """
    number = 1
    with file:
        try:
            while line := file.readline(LONGEST_LINE + 1):
                reason = None
                if len(line) > LONGEST_LINE:
                    reason = f"a line longer than {LONGEST_LINE >> 20} MiB"
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LONGEST_LINE)
                yield number, line.removeprefix(_BOM) if number == 1 else line, reason, False
                number += 1
        except DamagedStreamError as error:
            yield number, b"", str(error), True


def _line(number: int, text: str) -> JsonValue:
    decoder = Decoder()
    try:
        parsed, end = decoder.decode(text, _end(_SPACE, text, 0))
        if _end(_SPACE, text, end) < len(text):
            raise FaultError(f"more than one value on the line (column {end + 1})")
        decoder.check(text)
    except FaultError as fault:
        # An invalid byte often also breaks the syntax; the byte is the better reason.
        return JsonValue(number, None, damage(text) or str(fault))
    return JsonValue(number, parsed, None)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def damage(raw: str) -> str | None:
    """Returns why a section of text is unusable with any syntax; None if it isn't."""
    if bad := _BAD_BYTE.search(raw):
        return f"a byte that isn't UTF-8 (0x{ord(bad.group()) - 0xDC00:02x})"
    if "\x00" in raw:
        return "a NUL byte"
    return None


class Decoder:
    """A JSON decoder that reads on after invalid literals; ``check`` then raises an error."""

    def __init__(self) -> None:
        self._dubious: str | None = None
        self._json = json.JSONDecoder(
            parse_constant=self._constant,
            parse_int=self._int,
            parse_float=self._float,
            object_pairs_hook=self._object,
        )

    def decode(self, text: str, at: int, before: int = 0) -> tuple[Any, int]:
        """Returns the value that begins at `at`, and its end; raises FaultError on a syntax error.

        `before` is the number of characters before the text on its first line in the file.
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
            mark = text.startswith("\ufeff", error.pos)  # present in concatenated files
            what = "a byte order mark outside of texts" if mark else error.msg
            message = f"{reason}: {what} (column {column})"
            raise FaultError(message, error.pos, unterminated) from None
        except RecursionError:
            raise FaultError("nested too deeply") from None

    def check(self, raw: str) -> None:
        """Raises FaultError if the last decoded value, or its text, has forbidden contents."""
        if reason := damage(raw) or self._dubious:
            raise FaultError(reason)
        if is_too_deep(raw):
            raise FaultError("nested too deeply")

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            self._dubious = duplicate_reason(pairs)
        return values

    def _constant(self, name: str) -> float:
        self._dubious = f"{name}, which is not JSON"
        return 0.0

    def _int(self, digits: str) -> int:
        # Digits are counted first, because Python refuses integers of more than 4,300 digits.
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


# Reading of a JSON list through a window that moves over the file.
#
#   (1) the window contains the current example; its size doubles until the example is complete
#   (2) an example is read with `raw_decode`; if this fails far from the window's end, or in a
#       window of `LONGEST_LINE`, the example is damaged
#   (3) after a damaged example, reading continues at the next object that looks like an example
#
# So a list may be larger than memory, and a damaged example affects only itself.

_BETWEEN = re.compile(r"[ \t\r\n,]*")
_OBJECT = re.compile(r'\{[ \t\r\n]*"')  # inside a string the quote would be escaped
_READ = 1 << 16  # bytes
_LEAST = 1 << 20  # smallest number of characters of a window
_VAIN, _TIMES = 1 << 22, 4  # limit of repeated reading: characters, plus a multiple of the file
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')
_MARGIN = 16  # longest beginning of a truncated literal, number or escape, in characters


def scan_json(file: IO[bytes]) -> Iterator[JsonValue]:
    """Yields the examples of a stream: a list, one object, or lines. May raise OSError."""
    head, fault = b"", None
    with file:
        try:
            while not head.strip(b" \t\r\n").removeprefix(_BOM) and (chunk := file.read(_READ)):
                head += chunk
        except DamagedStreamError as error:
            fault = str(error)
        head = head.removeprefix(_BOM)
        if not head.lstrip(b" \t\r\n").startswith(b"["):
            parsed, head, fault = _single(head, file, fault)
            if parsed is not None:
                yield JsonValue(1, parsed, None)
            else:
                yield from scan_lines(io.BufferedReader(_Rejoined(head, file, fault)))
            return
        window = _Window(_Rejoined(head, file, fault))
        yield from _scan_list(window)
        if window.fault:
            yield JsonValue(window.line(len(window.text)), None, window.fault, lost=True)


def _single(head: bytes, file: IO[bytes], fault: str | None) -> tuple[Any, bytes, str | None]:
    """Returns the object if the stream is a single one, the bytes that were read, and a fault."""
    content, end, searched, several = bytearray(head), -1, 0, False
    while fault is None and len(content) <= LONGEST_LINE:
        if end < 0 and (end := content.find(b"\n", searched)) >= 0:
            several = _object(content[:end]) is None  # the object has several lines
        if end >= 0 and not several and content[end:].strip():
            return None, bytes(content), None  # one example a line
        searched = len(content)
        try:
            chunk = file.read(_READ)
        except DamagedStreamError as error:
            fault = str(error)
            break
        if not chunk:
            return _object(content), bytes(content), None
        content += chunk
    return None, bytes(content), fault


def _object(content: bytes | bytearray) -> dict[str, Any] | None:
    """Returns a valid JSON object; None for anything else."""
    parsed = _line(1, content.decode("utf-8", "surrogateescape")).value
    return parsed if isinstance(parsed, dict) else None


def _scan_list(window: _Window) -> Iterator[JsonValue]:  # noqa: C901  # each way that a list can be damaged
    while "[" not in window.text:  # more space before it than a window holds
        window.grow()
    at = window.text.index("[") + 1
    decoder = Decoder()
    usual: set[str] = set()  # keys of valid examples, which distinguish examples from inner objects
    while True:
        if at >= _LEAST:
            window.drop(at)
            at = 0
        at = _end(_BETWEEN, window.text, at)
        if at == len(window.text):
            if window.grow():
                continue
            break
        if window.text[at] == "]" and window.is_blank_after(at):
            return
        try:
            parsed, end = decoder.decode(window.text, at, window.before)
        except FaultError as fault:
            if window.may_help(at, fault) and window.grow():
                continue
            line = window.line(at)
            reason, at = _next_example(window, at, window.after(at, fault), usual)
            over = at == len(window.text)
            yield JsonValue(line, None, reason or str(fault), lost=over and window.last != "]")
            if over:
                return
            continue
        if end == len(window.text) and window.grow():
            continue  # a number may have more digits
        line, start, at = window.line(at), at, end
        try:
            decoder.check(window.text[start:at])
        except FaultError as fault:
            yield JsonValue(line, None, str(fault))
            continue
        if isinstance(parsed, dict):
            usual |= parsed.keys()
        yield JsonValue(line, parsed, None)
    message = "the list isn't closed: the file may be truncated"
    yield JsonValue(window.line(len(window.text)), None, message, lost=True)


def _next_example(window: _Window, start: int, at: int, usual: set[str]) -> tuple[str | None, int]:
    """Returns the damage up to the next object with a usual key, and where that begins.

    The damage is counted from `start`. The object is searched from `at`. If there is none,
    the position is the end of the window.
    """
    decoder = Decoder()
    reason = None
    while True:
        candidate = _OBJECT.search(window.text, at)
        if candidate is None:
            opened = window.text.rfind("{", at)  # the following quote may be outside the window
            keep = opened if opened >= 0 and window.is_space(opened + 1) else len(window.text)
            reason = reason or damage(window.text[start:keep])
            window.drop(keep)
            start = at = 0
            if not window.grow():
                return reason or damage(window.text), len(window.text)
            continue
        at = candidate.start()
        try:
            parsed, _ = decoder.decode(window.text, at)
        except FaultError as fault:
            if not (window.may_help(at, fault) and window.grow()):
                at = window.after(at, fault)
            continue
        if not usual or usual & parsed.keys():
            return reason or damage(window.text[start:at]), at
        at += 1


class _Window:
    """A section of a file as text."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = io.BufferedReader(file, _READ)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._counted, self._line = 0, 1  # position up to which lines are counted, and its line
        self._ended = False
        self.text = ""
        self._dropped = self._vain = 0  # characters that were removed, and that had no value
        self.before = 0  # characters of the first line before the window
        self.last = ""  # last character that isn't a space
        self.fault: str | None = None  # why the file can't be read to its end
        self.grow()

    def grow(self) -> bool:
        """Doubles the window, to at least `_LEAST`; returns False at the end of the file."""
        pieces, wanted = [self.text], max(len(self.text), _LEAST)
        while wanted > 0 and not self._ended:
            try:
                chunk = self._file.read(_READ)
            except DamagedStreamError as error:
                self.fault, chunk = str(error), b""
            self._ended = not chunk
            pieces.append(self._decoder.decode(chunk, final=self._ended))
            self.last = pieces[-1].rstrip()[-1:] or self.last
            wanted -= len(pieces[-1])
        self.text = "".join(pieces)
        return any(pieces[1:])

    def drop(self, at: int) -> None:
        """Removes everything before a position, which becomes 0."""
        line = self.text.rfind("\n", 0, at)
        self.before = at - line - 1 if line >= 0 else self.before + at
        self.line(at)
        self._counted -= at
        self._dropped += at
        self.text = self.text[at:]

    def line(self, at: int) -> int:
        """Returns the file's line at a position; positions must not decrease."""
        self._line += self.text.count("\n", self._counted, at)
        self._counted = max(at, self._counted)
        return self._line

    def may_help(self, at: int, fault: FaultError) -> bool:
        """Returns True if a value that begins at `at` may only be cut by the window's end."""
        near = fault.unterminated or fault.at >= len(self.text) - _MARGIN
        return near and len(self.text) - at < LONGEST_LINE

    def after(self, at: int, fault: FaultError) -> int:
        """Returns where to continue after a value at `at` that can't be read.

        The next value may be inside it. Nested objects are each read up to the damage. If that
        takes far more reading than the file has bytes, reading continues behind the damage.
        """
        end = max(fault.at, at + 1) if fault.at else _deep_end(self.text, at)
        self._vain += end - at
        return end if self._vain > _VAIN + _TIMES * (self._dropped + at) else at + 1

    def is_space(self, at: int) -> bool:
        """Returns True if only space follows in the window."""
        return _end(_SPACE, self.text, at) == len(self.text)

    def is_blank_after(self, at: int) -> bool:
        """Returns True if only space follows the character at `at` in the file."""
        while self.is_space(at + 1):
            if not self.grow():
                return True
        return False


class _Rejoined(io.RawIOBase):
    """A stream with its beginning, which was read before."""

    def __init__(self, head: bytes, file: IO[bytes], fault: str | None) -> None:
        super().__init__()
        self._head, self._file, self._fault = head, file, fault

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._head:
            chunk, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        elif self._fault:
            raise DamagedStreamError(self._fault)
        else:
            chunk = self._file.read(len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)


def _deep_end(text: str, at: int) -> int:
    """Returns the position at which a value becomes nested too deeply."""
    depth = 0
    for bracket in _STRING_OR_BRACKET.finditer(text, at):
        mark = text[bracket.start()]
        depth += (mark in "[{") - (mark in "]}")
        if depth >= DEEPEST:
            return bracket.end()
    return len(text)


# Files with one object: a table of pandas, or lists under keys.

_LOOK = 200  # first rows, of which one must be an example
_LISTS = (
    *("data", "dataset", "rows", "examples", "samples", "instances", "items"),
    *("train", "validation", "valid", "dev", "test"),
)


def examples_of(  # noqa: C901  # a clause for each shape of file
    document: dict[str, Any],
    shaped: Callable[[Any], object],
    reads: Callable[[Any], bool],
) -> list[Any] | None:
    """Returns the examples in a file's only object; None if it is an example, or unknown.

    Args:
        document: the object.
        shaped: returns a true value if an object has the columns of a known shape.
        reads: returns True if an object is a valid example.

    Raises:
        InputError: the object has several lists of examples.
    """
    columns = list(document.values())
    if shaped(document):
        if reads(document):
            return None
        if all(isinstance(column, dict) for column in columns):  # pandas: {column: {row: value}}
            rows = columns[0].keys()
            if any(column.keys() != rows for column in columns):
                return None
            examples = [{key: column[row] for key, column in document.items()} for row in rows]
            return examples if any(map(reads, examples[:_LOOK])) else None
        if not all(isinstance(column, list) for column in columns):
            return None
        examples = [dict(zip(document, row, strict=True)) for row in zip(*columns, strict=False)]
        if not any(map(reads, examples[:_LOOK])):
            return None  # one damaged example with lists in it
        if len({*map(len, columns)}) != 1:
            sizes = ", ".join(f"{key} {len(column)}" for key, column in document.items())
            raise InputError(
                f"its columns have different numbers of values ({sizes}): write a list of examples"
            )
        return examples
    names, table_rows = document.get("columns", ()), document.get("data", ())
    if _all(names, str) and _all(table_rows, list):  # pandas: orient="split"
        return [dict(zip(names, row, strict=False)) for row in table_rows]
    firsts = {
        key: column[0] if isinstance(column, list) and column else column
        for key, column in document.items()
    }
    parts = [key for key in _LISTS if isinstance(firsts.get(key), dict) and firsts[key]]
    if len(parts) > 1:
        raise InputError(
            f"has several lists of examples ({', '.join(parts)}): write each to a separate file"
        )
    if parts and isinstance(inner := document[parts[0]], dict):
        return examples_of(inner, shaped, reads) or ([inner] if reads(inner) else None)
    if parts:
        return list(document[parts[0]])
    if columns and all(isinstance(example, dict) for example in columns) and shaped(columns[0]):
        return columns  # pandas: orient="index"
    return None


def _all(parsed: Any, kind: type) -> bool:
    return isinstance(parsed, list) and all(isinstance(one, kind) for one in parsed)
