"""Conversations out of JSON and JSON Lines files, whichever of the usual shapes they have.

The shape is decided once per file, from its first records, and reported: a record that lacks what
the shape needs is rejected with its place and reason, never read as something else.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from hasten.data.jsonscan import Found, scan
from hasten.data.shapes import SHAPES, Conversation, Message, UnfitError, conversation, shape_of
from hasten.errors import InputError

__all__ = ["Conversation", "Message", "Reading", "Rejected", "check_rejected", "read_records"]

SUFFIXES = (".json", ".jsonl")
_LOOK = 200  # records that decide a file's shape


class Rejected(NamedTuple):
    """A record that can't be used."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Reading:
    """What the files gave."""

    conversations: list[Conversation]
    rejected: list[Rejected]
    shapes: dict[str, str]  # file -> name of its shape


def read_records(paths: Sequence[Path], max_rejected: float = 0.001) -> Reading:
    """All records of files and folders (their .json and .jsonl files, sorted by name).

    `max_rejected` below 1 is a share of all records, from 1 on a count. Raises InputError where
    more are rejected, nothing is left, a file is missing or has no known shape.
    """
    reading = Reading([], [], {})
    for path in _files(paths):
        try:
            _read_file(path, reading)
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    total = len(reading.conversations) + len(reading.rejected)
    check_rejected(reading.rejected, total, max_rejected)
    if not reading.conversations:
        raise InputError(f"no usable record in {', '.join(map(str, paths))}")
    return reading


def check_rejected(rejected: Sequence[Rejected], total: int, max_rejected: float) -> None:
    """Raise InputError if more of `total` records are rejected than `max_rejected` allows."""
    if not max_rejected >= 0:
        raise InputError(f"max_rejected is {max_rejected}: give a share below 1 or a count")
    allowed = int(max_rejected * total) if max_rejected < 1 else max_rejected
    if len(rejected) <= allowed:
        return
    first = "; ".join(f"{file}:{line}: {reason}" for file, line, reason in rejected[:3])
    raise InputError(
        f"{len(rejected)} of {total} records can't be used and max_rejected={max_rejected:g} "
        f"allows {allowed:g}: {first}{'; ...' if len(rejected) > 3 else ''} "
        "(fix these records, or raise max_rejected)"
    )


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    if not paths:
        raise InputError("no data file is named: give a .json or .jsonl file, or a folder of them")
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
            if not files:
                raise InputError(f"the folder {path} has no .json or .jsonl file")
            yield from files
        elif not path.exists():
            raise InputError(f"there is no file {path}{_near(path)}")
        elif path.suffix not in SUFFIXES:
            raise InputError(f"{path} is neither a .json nor a .jsonl file: convert or rename it")
        else:
            yield path


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor a folder {path.parent}"
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()])
    return f": did you mean {' or '.join(close)}?" if close else ": check the name"


def _read_file(path: Path, reading: Reading) -> None:
    records = scan(path)
    head = list(islice(records, _LOOK))
    if not head:
        raise InputError(f"{path} is empty: it needs at least one record")
    shape = _detect(path, head)
    reading.shapes[str(path)] = shape
    for found in chain(head, records):
        try:
            if found.reason is not None:
                raise UnfitError(found.reason)
            made = conversation(found.value, shape, f"{path}:{found.line}")
        except UnfitError as unfit:
            reading.rejected.append(Rejected(str(path), found.line, str(unfit)))
        else:
            reading.conversations.append(made)


def _detect(path: Path, head: Sequence[Found]) -> str:
    """The shape that most of the first records have, the earliest of the table where several do."""
    objects = [found.value for found in head if isinstance(found.value, dict)]
    votes = Counter(name for record in objects if (name := shape_of(record)))
    if votes:
        return votes.most_common(1)[0][0]
    if not objects:
        return "unknown"  # no record is sound: each is rejected with its own reason
    known = "; ".join(f"{name}: {' + '.join(shape.needs)}" for name, shape in SHAPES.items())
    raise InputError(
        f"{path} has none of the known shapes: its first record has the keys "
        f"{', '.join(map(repr, objects[0])) or '(none)'}; rename them to one of {known}"
    )
