"""Examples from tables: CSV, Parquet and Arrow, row by row, each with its row number.

CSV rows count as a spreadsheet shows them: the header is row 1. Rows of Parquet and
Arrow files begin at 1. Tables are read in batches. A damaged batch is read row by row,
so a damaged row affects only itself. If the rest of a file can't be read, reading ends
in a fault that reports it.
"""

from __future__ import annotations

import csv
import io
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from hasten.data.containers import (
    FLOOR,
    Container,
    DamagedStreamError,
    growth_limit,
    open_stream,
    too_large,
)
from hasten.data.json_reader import LONGEST_LINE, JsonValue, damage
from hasten.errors import InputError

# Limits of tables: the size of a Parquet or Arrow file in memory is computed before it is unpacked.
#
# A few kilobytes can become gigabytes: pages and buffers are compressed, and a dictionary stores a
# long text once and repeats it by number. Four checks keep a file within its limit:
#
#   (1) Parquet's counts of uncompressed bytes, and the sizes before Arrow's compressed buffers, are
#       added up before anything is unpacked
#   (2) the rows of a batch take about `BATCH_BYTES` on average
#   (3) a text column is read as a dictionary if its longest entry, repeated, would exceed the limit
#   (4) the bytes of rows as Python objects are counted before a few rows at a time are converted
#
# The sizes in a Parquet footer may be wrong: a forged one hides at most 2 GiB, the format's limit
# of a page.

BATCH_BYTES = 1 << 26  # bytes of a batch of rows
ROWS = 1024  # rows of a batch at most
# What Python objects take, in bytes: a file of nulls is a bomb too.
_ROW = _STRUCT = 200  # an object with a few keys
_OTHER_CELL = 64  # any other value, however small, and its place in a list or object
_LISTS: tuple[Any, ...] = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)
_LISTS += (pa.ListViewArray, pa.LargeListViewArray)
_DICTIONARY = ("PLAIN_DICTIONARY", "RLE_DICTIONARY")
_PREFIXES = "DELTA_BYTE_ARRAY"  # a text is a part of the one before it and what follows
_LEGACY = b"ARROW:experimental_compression"
_BATCH, _DICTIONARY_BATCH = 3, 2  # MessageHeader in Arrow's Message.fbs


def parquet_batches(path: Path) -> tuple[list[str], Iterator[Any]]:
    """Returns columns and batches of a Parquet file; raises InputError beyond the file's limit."""
    import pyarrow.parquet as pq

    limit = growth_limit(path)
    file = pq.ParquetFile(path)
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    total_bytes = sum(chunk.total_uncompressed_size for group in groups for chunk in _chunks(group))
    values = sum(chunk.num_values for group in groups for chunk in _chunks(group))
    if max(total_bytes, _ROW * file.metadata.num_rows, _OTHER_CELL * values) > limit:
        raise too_large(path, limit)
    rows = max(1, min(ROWS, BATCH_BYTES // max(1, total_bytes // max(1, file.metadata.num_rows))))
    repeated: set[str] = set()
    for number, group in enumerate(groups):
        for chunk in _chunks(group):
            nested, size = "." in chunk.path_in_schema, chunk.total_uncompressed_size
            if _PREFIXES in chunk.encodings and size * (chunk.num_values if nested else 1) > limit:
                raise InputError(
                    f"{path}: the texts of {chunk.path_in_schema} may become larger than "
                    f"{limit >> 20} MiB ({_PREFIXES}): write the file with plain encoding"
                )
            times = chunk.num_values if nested else min(rows, chunk.num_values)
            if _PREFIXES in chunk.encodings:
                rows = max(1, min(rows, limit // max(1, size)))
            elif {*chunk.encodings} & {*_DICTIONARY} and size * times > limit:
                longest = _longest(path, number, chunk.path_in_schema)
                if longest is None or longest * times > limit:
                    repeated.add(chunk.path_in_schema)
    if repeated:
        file = pq.ParquetFile(path, read_dictionary=sorted(repeated))
    # Group by group: pyarrow joins no dictionaries of nested columns across row groups.
    batches = (file.iter_batches(rows, [number]) for number in range(len(groups)))
    return file.schema_arrow.names, chain.from_iterable(batches)


def arrow_batches(path: Path) -> tuple[list[str], Iterator[Any]]:
    """Returns columns and batches of an Arrow file; raises InputError beyond its limit."""
    source = pa.memory_map(str(path))
    framed = source.read(6) == b"ARROW1"
    source.seek(0)
    if framed:
        count = pa.ipc.open_file(source).num_record_batches  # a file with a footer is complete
        source.seek(8)  # a file has a stream after its mark
    start = source.tell()
    sizes = _declared(source)
    remaining_bytes, batches, fault = growth_limit(path), 0, None
    while True:
        try:
            kind, size = next(sizes)
        except StopIteration:
            break
        except (pa.ArrowException, OSError, ValueError, struct.error) as error:
            fault = ValueError(str(error))
            break
        remaining_bytes -= size
        if remaining_bytes < 0:
            raise too_large(path, growth_limit(path))
        batches += kind == _BATCH
    source.seek(start)
    reader = pa.ipc.open_stream(source)
    if framed and fault is None and batches != count:
        fault = ValueError(f"its footer lists {count} batches, and it has {batches}")
    return reader.schema.names, _first(reader, batches, fault)


def row_slices(batch: Any) -> Iterator[tuple[Any, int]]:
    """Yields slices of a batch with few rows, each with its bytes as Python objects."""
    for at in range(0, batch.num_rows, ROWS):
        yield from _halved(batch.slice(at, ROWS))


def _halved(rows: Any) -> Iterator[tuple[Any, int]]:
    size, count = _ROW * rows.num_rows + sum(map(decoded_bytes, rows.columns)), rows.num_rows
    if size <= BATCH_BYTES or count == 1:
        yield rows, size
        return
    yield from _halved(rows.slice(0, count // 2))
    yield from _halved(rows.slice(count // 2))


def decoded_bytes(array: Any) -> int:
    """Estimates the bytes of an array as Python objects; at least those of its texts."""
    kind, base_bytes = array.type, _OTHER_CELL * len(array)
    if pa.types.is_dictionary(kind):
        return base_bytes + _repeated(array)
    if pa.types.is_struct(kind):
        return _STRUCT * len(array) + sum(decoded_bytes(child) for child in array.flatten())
    if pa.types.is_map(kind):
        first, last = (array.offsets[at].as_py() for at in (0, len(array)))
        parts = (part.slice(first, last - first) for part in (array.keys, array.items))
        return base_bytes + _OTHER_CELL * int(last - first) + sum(map(decoded_bytes, parts))
    if isinstance(array, _LISTS):
        return base_bytes + decoded_bytes(array.flatten())
    if isinstance(array, pa.ExtensionArray):
        return base_bytes + decoded_bytes(array.storage)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32)[4 * array.offset :]  # (4 x values,)
        return base_bytes + int(views[: 4 * len(array) : 4].sum(dtype=np.int64))
    if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        raise InputError(
            f"values of type {kind} are not read: cast the table's column to lists or texts"
        )
    return base_bytes + int(array.nbytes)


def _chunks(group: Any) -> Iterator[Any]:
    return map(group.column, range(group.num_columns))


def _longest(path: Path, group: int, column: str) -> int | None:
    """Returns the bytes of the longest entry of a column's dictionary; None: unknown."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, read_dictionary=[column])
    batches = file.iter_batches(batch_size=1, row_groups=[group], columns=[column])
    array = next(batches).column(0)
    while not pa.types.is_dictionary(array.type):
        if not pa.types.is_nested(array.type) or len(array.flatten()) == 0:
            return None
        flat = array.flatten()
        array = flat[0] if isinstance(flat, list) else flat
    longest: int | None = pc.max(pc.binary_length(array.dictionary)).as_py()
    return longest


def _repeated(array: Any) -> int:
    """Bytes of a dictionary array's values, each as often as it occurs."""
    entries, kind = array.dictionary, array.dictionary.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if large or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return int(pc.sum(pc.binary_length(entries).take(array.indices)).as_py() or 0)
    if pa.types.is_primitive(kind):
        return 0
    return decoded_bytes(entries) * len(array)  # at most


def _first(reader: Any, count: int, fault: ValueError | None) -> Iterator[Any]:
    for _ in range(count):
        yield reader.read_next_batch()
    if fault is not None:
        raise fault


def _declared(source: Any) -> Iterator[tuple[int, int]]:
    """Yields the kind of each message of a stream, and the unpacked bytes of its body."""
    messages = pa.ipc.MessageReader.open_stream(source)
    for message in messages:
        meta, body = message.metadata.to_pybytes(), message.body
        if _LEGACY in meta:
            raise ValueError("its compression is of an Arrow version before 1.0: write it again")
        table = _Table(meta, int.from_bytes(meta[:4], "little"))
        kind, header = table.byte(1), table.table(2)
        batch = header.table(1) if kind == _DICTIONARY_BATCH and header else header
        if kind not in (_BATCH, _DICTIONARY_BATCH) or batch is None or body is None:
            yield kind, 0
            continue
        packed = batch.table(3) is not None
        yield kind, sum(_size(body, *buffer, packed) for buffer in batch.pairs(2))


def _size(body: Any, offset: int, length: int, packed: bool) -> int:
    """Bytes that a buffer of a message's body becomes: a compressed one begins with them."""
    if not 0 <= offset <= offset + length <= body.size:
        raise ValueError("a buffer is outside its message")
    if not packed or not length:
        return length
    (size,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
    return length if size == -1 else int(abs(size))  # -1: this one is not compressed


class _Table:
    """A table of a flatbuffer, read as flatbuffers.dev describes the binary format."""

    def __init__(self, buffer: bytes, at: int) -> None:
        self._buffer, self._at = buffer, at
        self._fields = at - struct.unpack_from("<i", buffer, at)[0]
        self._size = struct.unpack_from("<H", buffer, self._fields)[0]

    def byte(self, number: int) -> int:
        at = self._field(number)
        return self._buffer[at] if at else 0

    def table(self, number: int) -> _Table | None:
        at = self._field(number)
        return _Table(self._buffer, at + self._offset(at)) if at else None

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yields a vector of structs of two 64-bit integers."""
        at = self._field(number)
        if not at:
            return
        start = at + self._offset(at)
        for index in range(self._offset(start)):
            yield struct.unpack_from("<qq", self._buffer, start + 4 + 16 * index)

    def _field(self, number: int) -> int:
        entry = 4 + 2 * number
        if entry >= self._size:
            return 0
        offset = struct.unpack_from("<H", self._buffer, self._fields + entry)[0]
        return self._at + int(offset) if offset else 0

    def _offset(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._buffer, at)[0])


# Rows of tables as examples.

_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


def scan_csv(path: Path, container: Container) -> Iterator[JsonValue]:
    """Yields the rows of a CSV or TSV file as objects; every cell is a text.

    Rows without any text are left out: tools leave them between tables and at the end.

    Raises InputError for a header that can't name columns.
    """
    with open_stream(path, container) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        mark = "\t" if container.kind == "tsv" else ","
        rows = _csv_rows(csv.reader(_lines(text, path), strict=True, delimiter=mark))
        header: list[str] | None = None
        for number, cells, reason, lost in rows:
            if header is None:
                header = _header(path, cells, reason, mark)
            elif reason is not None or any(cells):
                if reason is None:
                    reason = next(filter(None, map(damage, cells)), None)
                if reason is None and len(cells) != len(header):
                    reason = (
                        f"has {len(cells)} columns, the header {len(header)} (commas in texts need "
                        "quotes)"
                    )
                example = dict(zip(header, cells, strict=False)) if reason is None else None
                yield JsonValue(number, example, reason, lost)


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yields the lines of a text; raises InputError at one that is too long."""
    while line := text.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise InputError(
                f"{path} has a line longer than {LONGEST_LINE >> 20} MiB: save it as CSV with a "
                "row in each line"
            )
        yield line


def _csv_rows(reader: Any) -> Iterator[tuple[int, list[str], str | None, bool]]:
    """Yields numbered rows, or the reason why a row can't be read.

    After such a row, reading continues at the next line. The last value is True if the rows
    that follow are lost with it. A quote that isn't closed takes them all, up to the end or
    to the next quote.
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


def _header(path: Path, cells: list[str], reason: str | None, mark: str) -> list[str]:
    reason = reason or damage("".join(cells))
    if reason:
        raise InputError(f"{path}:1: the header has {reason}; save the file as CSV in UTF-8")
    others = [other for other in ",;\t|" if other in cells[0]] if len(cells) == 1 else []
    if others:
        name = "tabs" if mark == "\t" else "commas"
        raise InputError(f"{path}:1: the header has {others[0]!r} between columns: use {name}")
    twice = _twice(cells)
    if twice or not any(cells):
        what = f"names {twice[0]!r} twice" if any(twice) else "has a column without a name"
        raise InputError(f"{path}:1: the header {what}; give every column its own name")
    return cells


def _twice(names: list[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def scan_table(path: Path, container: Container) -> Iterator[JsonValue]:
    """Yields the rows of a Parquet or Arrow file; raises InputError if it isn't one."""
    number, remaining_bytes = 1, growth_limit(path)
    pieces = _pieces(_opened(path, container.kind), container.kind)
    while True:
        try:
            rows, size = next(pieces)
            remaining_bytes -= size
            if remaining_bytes < 0:
                raise too_large(path, growth_limit(path))
            if size > FLOOR:
                raise InputError(
                    f"{path}: row {number} takes over {FLOOR >> 20} MiB: write it as several"
                )
            values = [JsonValue(number + row, cell, None) for row, cell in enumerate(_values(rows))]
        except StopIteration:
            return
        except InputError as error:
            prefix = "" if str(path) in str(error) else f"{path}:{number}: "
            raise InputError(f"{prefix}{error}") from error
        except _FAULTS as error:
            what = "is damaged here" if _is_damage(error) else "has what pyarrow can't read"
            message = f"the {container.kind} file {what}: {_line(error)}"
            yield JsonValue(number, None, message, lost=True)
            return
        yield from (
            json_value
            if not isinstance(json_value.value, str)
            else JsonValue(json_value.line, None, json_value.value)
            for json_value in values
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
        what = f"isn't a whole {kind} file" if _is_damage(error) else "has what pyarrow can't read"
        raise InputError(f"{path} {what}: {_line(error)}; write or fetch it again") from error
    if twice := _twice(names):
        raise InputError(f"{path} has two columns {twice[0]!r}: give every column its own name")
    return batches


def _is_damage(error: BaseException) -> bool:
    """Returns True for an error of the format; raises errors of the disk or the system."""
    if isinstance(error, OSError) and error.errno:
        raise error
    return isinstance(error, OSError | ValueError)


def _values(batch: Any) -> list[Any]:
    """Returns the rows as objects; a row that can't be one is a string with the reason."""
    try:
        rows: list[Any] = batch.to_pylist()
    except _FAULTS:
        rows = [_row(batch.slice(at, 1)) for at in range(batch.num_rows)]
    if any(pa.types.is_nested(column.type) for column in batch.columns):
        # Nested objects lose their nulls: a table fills in all keys that any row has.
        for row in (row for row in rows if isinstance(row, dict)):
            row |= {key: _without_nulls(cell) for key, cell in row.items()}
    return rows


def _without_nulls(cell: Any) -> Any:
    if isinstance(cell, dict):
        return {key: _without_nulls(inner) for key, inner in cell.items() if inner is not None}
    if not isinstance(cell, list):
        return cell
    if cell and all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in cell):
        return _without_nulls(dict(cell))  # a map, as Arrow gives it
    return [_without_nulls(inner) for inner in cell]


def _row(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return f"a byte that isn't UTF-8 (0x{error.object[error.start]:02x})"
    except _FAULTS as error:
        return f"a value that can't be read: {_line(error)}"


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
