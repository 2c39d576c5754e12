"""The containers of examples: recognised by name, confirmed by their first bytes.

  - .jsonl .json .txt: text, plain or compressed (.gz, .zst); .txt has one text per line
  - .csv .tsv: the same; cells are between commas or tabs
  - .parquet .arrow: tables; .arrow is Arrow's file or stream format

A file is refused if its name and first bytes contradict each other: nothing is guessed.
Compressed files are streams: memory never holds more than was read of them. They end in
an error if they have grown beyond `RATIO` times the file, but never before `FLOOR`
bytes. Text that people write compresses 3 to 20 times, a decompression bomb a thousand
times and more.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from hasten.errors import InputError
from hasten.foreign_files import first_bytes, open_regular

RATIO = 200
FLOOR = 1 << 28  # bytes
_CHUNK = 1 << 13  # bytes decompressed at once; a truncated stream loses no more
_TEXT = ("jsonl", "json", "csv", "tsv", "txt")
_TABLES = ("parquet", "arrow")
_PACKED = {"gz": "gzip", "zst": "zstd"}
_MAGIC = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd",),
    "parquet": (b"PAR1",),
    "arrow": (b"ARROW1", b"\xff\xff\xff\xff"),  # file, stream
}
SUFFIXES = (*(f".{kind}" for kind in _TEXT), *(f".{kind}" for kind in _TABLES))
NAMES = f"{', '.join(SUFFIXES)} (text also as .gz or .zst)"


class Container(NamedTuple):
    """Format and compression of a file with examples."""

    kind: str  # jsonl, json, csv, tsv, txt, parquet or arrow
    packed: str | None  # gzip or zstd

    def __str__(self) -> str:
        kind = "txt, one text a line" if self.kind == "txt" else self.kind
        return f"{kind}, {self.packed}" if self.packed else kind


class DamagedStreamError(ValueError):
    """A damaged compressed stream."""


def named(path: Path) -> Container | None:
    """Returns the container by a file's name; None if the name has no known suffix."""
    *name_parts, last = path.name.lower().split(".")
    if last in _PACKED and len(name_parts) > 1 and name_parts[-1] in _TEXT:
        return Container(name_parts[-1], _PACKED[last])
    return Container(last, None) if name_parts and last in (*_TEXT, *_TABLES) else None


def container_of(path: Path) -> Container:
    """Returns the container of a file; raises InputError if name and first bytes contradict."""
    container = named(path)
    if container is None:
        raise InputError(f"{path} is none of {NAMES}: convert or rename it")
    head = first_bytes(path)[:8]
    declared_kind = container.packed or container.kind
    actual = next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)
    if declared_kind in _MAGIC and actual != declared_kind:
        what = f"it is {actual}" if actual else f"it begins with {head!r}" if head else "it's empty"
        raise InputError(
            f"{path} isn't the {declared_kind} file that its name announces: {what}; rename it"
        )
    if declared_kind not in _MAGIC and actual and not head.startswith(b"\xff" * 4):
        raise InputError(
            f"{path} is {actual}, not the {declared_kind} file that its name announces: rename it"
        )
    if container == Container("jsonl", None) and head.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"["):
        return Container("json", None)  # a .jsonl file that is one JSON list
    return container


def open_stream(path: Path, container: Container) -> IO[bytes]:
    """Returns the decompressed stream; reading may raise DamagedStreamError or InputError."""
    if container.packed is None:
        file = open_regular(path)
        _refuse_hole(file, path)
        return file
    return io.BufferedReader(_Unpacked(path, container.packed), _CHUNK)


def _refuse_hole(file: IO[bytes], path: Path) -> None:
    """Raises InputError for a file with bytes that were never written.

    An interrupted copy has them, and they may make a file arbitrarily large.
    """
    size, hole = os.fstat(file.fileno()).st_size, None
    with contextlib.suppress(OSError, AttributeError):  # not every system supports SEEK_HOLE
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
    if hole is not None and hole < size:
        file.close()
        raise InputError(
            f"{path} has a hole from byte {hole:,}, which was never written: copy the file again"
        )


def growth_limit(path: Path) -> int:
    """Returns the largest allowed size of a decompressed file."""
    return max(FLOOR, RATIO * path.stat().st_size)


def too_large(path: Path, limit: int) -> InputError:
    """Returns the error for a file that grew beyond its limit."""
    return InputError(
        f"{path} becomes larger than {limit >> 20} MiB, {RATIO} times the file or more, when it is "
        "unpacked; if the file is right, write it as plain .jsonl"
    )


class _Unpacked(io.RawIOBase):
    """Decompressed bytes, counted; Arrow's streams report a cut file, and zlib checks sums."""

    def __init__(self, path: Path, packed: str) -> None:
        super().__init__()
        self._path, self._packed = path, packed
        self._file = open_regular(path)
        self._stream: Any = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), packed)
        self._remaining = self._limit = growth_limit(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            chunk: bytes = self._stream.read(min(len(buffer), _CHUNK))
        except (OSError, pa.ArrowException) as error:
            what = str(error).splitlines()[0]
            if "too much memory" in what:  # the compression window is larger than 128 MiB
                advice = "was packed with a long window: unpack it with `zstd -d --long=31`"
                raise InputError(f"{self._path} {advice}") from None
            raise DamagedStreamError(f"the {self._packed} stream is damaged: {what}") from None
        self._remaining -= len(chunk)
        if self._remaining < 0:
            raise too_large(self._path, self._limit)
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()
