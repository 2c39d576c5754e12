"""Records out of tables: CSV, Parquet and Arrow, row by row, each with the number of its row.

CSV rows count as a spreadsheet shows them: the header is row 1. Rows of Parquet and Arrow files
begin at 1. Tables are read in batches; a batch that isn't sound is read row by row, so that a
damaged row costs itself alone. What can't be read any further ends in a fault that says so.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from hasten.data.containers import (
    FLOOR,
    Container,
    DamagedStreamError,
    growth_limit,
    open_stream,
    too_large,
)
from hasten.data.jsonscan import Found, damage
from hasten.data.tablebounds import arrow_batches, parquet_batches, row_slices
from hasten.errors import InputError

_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


def scan_csv(path: Path, container: Container) -> Iterator[Found]:
    """The rows of a CSV file as objects with the header's keys; every cell is a text.

    Raises InputError for a header that can't name columns.
    """
    with open_stream(path, container) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        rows = _csv_rows(csv.reader(text, strict=True))
        header: list[str] | None = None
        blank: list[int] = []  # empty rows are faults only if something follows them
        for number, cells, reason, lost in rows:
            if header is None:
                header = _header(path, cells, reason)
            elif reason is None and not any(cells):
                blank.append(number)
            else:
                yield from (Found(row, None, "an empty row") for row in blank)
                blank.clear()
                yield _csv_record(number, header, cells, reason, lost)


def _csv_rows(reader: Any) -> Iterator[tuple[int, list[str], str | None, bool]]:
    """Numbered rows, or the reason why one can't be read; reading goes on at the next line.

    The last value: rows that follow are lost with it. A quote that isn't closed takes them all, up
    to the end or to the next quote.
    """
    number = 0
    while True:
        number += 1
        line = reader.line_num + 1
        try:
            yield number, next(reader), None, False
        except StopIteration:
            return
        except csv.Error as error:
            lost = reader.line_num > line or "unexpected end" in str(error)
            quote = f"; a quote of line {line} isn't closed before line {reader.line_num}"
            yield number, [], f"not CSV: {error}{quote if lost else ''}", lost
        except DamagedStreamError as error:
            yield number, [], str(error), True
            return


def _header(path: Path, cells: list[str], reason: str | None) -> list[str]:
    reason = reason or damage("".join(cells))
    if reason:
        raise InputError(f"{path}:1: the header has {reason}; save the file as CSV in UTF-8")
    if len(cells) == 1 and (other := next((mark for mark in ";\t|" if mark in cells[0]), None)):
        raise InputError(f"{path}:1: the header has {other!r} between columns: use commas")
    twice = _twice(cells)
    if twice or not any(cells):
        what = f"names {twice[0]!r} twice" if any(twice) else "has a column without a name"
        raise InputError(f"{path}:1: the header {what}; give every column its own name")
    return cells


def _twice(names: list[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def _csv_record(
    number: int, header: list[str], cells: list[str], reason: str | None, lost: bool
) -> Found:
    if reason is None:
        reason = next((found for cell in cells if (found := damage(cell))), None)
    if reason is None and len(cells) != len(header):
        reason = f"has {len(cells)} columns, the header {len(header)} (commas in texts need quotes)"
    record = dict(zip(header, cells, strict=False)) if reason is None else None
    return Found(number, record, reason, lost)


def scan_table(path: Path, container: Container) -> Iterator[Found]:
    """The rows of a Parquet or Arrow file; raises InputError where there is no such file in it."""
    number, left = 1, growth_limit(path)
    pieces = _pieces(_opened(path, container.kind), container.kind)
    while True:
        try:
            rows, size = next(pieces)
            left -= size
            if left < 0:
                raise too_large(path, growth_limit(path))
            if size > FLOOR:
                raise InputError(
                    f"{path}: row {number} takes over {FLOOR >> 20} MiB: write it as several"
                )
            values = [Found(number + row, value, None) for row, value in enumerate(_values(rows))]
        except StopIteration:
            return
        except InputError:
            raise
        except _FAULTS as error:
            words = f"the {container.kind} file is damaged here: {_line(error)}"
            yield Found(number, None, words, lost=True)
            return
        yield from (
            found if not isinstance(found.value, str) else Found(found.line, None, found.value)
            for found in values
        )
        number += len(values)


def _pieces(batches: Iterator[Any], kind: str) -> Iterator[tuple[Any, int]]:
    for batch in batches:
        batch.validate(full=kind == "arrow")  # offsets are trusted as they are read
        yield from row_slices(batch)


def _opened(path: Path, kind: str) -> Iterator[Any]:
    try:
        names, batches = parquet_batches(path) if kind == "parquet" else arrow_batches(path)
    except InputError:
        raise
    except _FAULTS as error:
        raise InputError(
            f"{path} isn't a whole {kind} file: {_line(error)}; write or fetch it anew"
        ) from error
    if twice := _twice(names):
        raise InputError(f"{path} has two columns {twice[0]!r}: give every column its own name")
    return batches


def _values(batch: Any) -> list[Any]:
    """The rows as objects; a row that can't be one is a string, which says why."""
    try:
        rows: list[Any] = batch.to_pylist()
    except _FAULTS:
        rows = [_row(batch.slice(at, 1)) for at in range(batch.num_rows)]
    if any(pa.types.is_nested(column.type) for column in batch.columns):
        return [_own_keys(row) if isinstance(row, dict) else row for row in rows]
    return rows


def _own_keys(row: dict[str, Any]) -> dict[str, Any]:
    """The row, its nested objects without nulls: a table fills in all keys that any row has."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"a byte that isn't UTF-8 (0x{error.object[error.start]:02x})"
    except _FAULTS as error:
        return f"a value that can't be read: {_line(error)}"


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
