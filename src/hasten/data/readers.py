"""Conversations read from files, in any supported container and any usual shape.

The shape is decided once per file, from its first examples, and reported with the
container. An example that lacks what the shape needs is rejected with its position
(line, or row of a table) and reason. It is never read as something else.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from hasten.data.containers import NAMES, Container, container_of, named, open_stream
from hasten.data.conversation import (
    ALL_SHAPES,
    ColumnNames,
    conversation,
    shape_of,
    unread,
)
from hasten.data.json_reader import JsonValue, examples_of, scan_json, scan_lines, scan_texts
from hasten.data.sources import FILE, Source, hub_files, hub_name, saved_files
from hasten.data.spool import ConversationSink
from hasten.data.stages import advice, missing_answers, placeholder_in, refuse_other_stage
from hasten.data.table_reader import scan_csv, scan_table
from hasten.data.turns import NoConversationError
from hasten.errors import InputError

_LOOK = 200  # examples that decide a file's shape
_SHOWN = 8  # names of columns that are not read
_REASONS = 3  # reasons that a message has
_SHOWN_KEYS = 20  # keys of an example that a message has


class Rejected(NamedTuple):
    """An example that can't be used."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class ReadExamples:
    """The examples read from the files."""

    conversations: ConversationSink
    rejected: list[Rejected]
    shapes: dict[str, str]  # file -> name of its shape
    containers: dict[str, str] = field(default_factory=dict)  # file -> its container
    unread: dict[str, set[str]] = field(default_factory=dict)  # file -> columns that aren't read
    # file -> placeholder of a picture, sound or film -> examples with one in a question or text
    placeholders: dict[str, Counter[str]] = field(default_factory=dict)


def read_examples(paths: Sequence[Path], max_rejected: float = 0.001) -> ReadExamples:
    """Reads all examples of files, and of folders (their files of known containers by name).

    `max_rejected` below 1 is a share of all examples, from 1 on a count. Raises InputError if
    more are rejected, no example is usable, or a file is missing or has no known shape.
    """
    readings = read_sources([Source(Path(path)) for path in paths], max_rejected)
    conversations = [one for reading in readings for one in reading.conversations]
    return replace(joined(readings), conversations=conversations)


def joined(readings: Sequence[ReadExamples]) -> ReadExamples:
    """Returns several readings as one, without copies of their conversations."""
    combined = ReadExamples([], [], {})
    for reading in readings:
        combined.rejected.extend(reading.rejected)
        for name in ("shapes", "containers", "unread", "placeholders"):
            getattr(combined, name).update(getattr(reading, name))
    return combined


def read_sources(
    sources: Sequence[Source],
    max_rejected: float = 0.001,
    gathered: Callable[[], ConversationSink] = list,
) -> list[ReadExamples]:
    """Reads sources as `read_examples` does, each into one result; `max_rejected` is for all.

    `gathered` returns the container for a source's examples.
    """
    if not sources:
        raise InputError(f"no data file is named: give a file ({NAMES}), or a folder of them")
    readings = []
    for source in sources:
        readings.append(ReadExamples(gathered(), [], {}))
        for path in _files(source.path):
            try:
                _read_file(path, source.columns, readings[-1])
            except OSError as error:
                raise InputError(f"{path} can't be read: {error.strerror or error}") from error
    rejected = [row for reading in readings for row in reading.rejected]
    usable = sum(len(reading.conversations) for reading in readings)
    check_rejected(rejected, usable + len(rejected), max_rejected)
    if not usable:
        raise InputError(f"no usable example in {', '.join(str(s.path) for s in sources)}")
    return readings


def check_rejected(rejected: Sequence[Rejected], total: int, max_rejected: float) -> None:
    """Raises InputError if more of `total` examples are rejected than `max_rejected` allows."""
    if not max_rejected >= 0:
        raise InputError(f"max_rejected is {max_rejected}: give a share below 1 or a count")
    # 0.29 of 100 is 28.999... in binary
    allowed = int(max_rejected * total + 1e-9) if max_rejected < 1 else max_rejected
    if len(rejected) <= allowed:
        return
    reasons = Counter(row.reason for row in rejected)
    first = {row.reason: row for row in reversed(rejected)}
    causes = [
        f"{first[reason].file}:{first[reason].line}: {reason}"
        + (f" ({count} of them)" if count > 1 else "")
        for reason, count in reasons.most_common(_REASONS)
    ]
    more = "; ..." if len(reasons) > len(causes) else ""
    without = f", or write max_rejected: {len(rejected)} to train without them"
    raise InputError(
        f"{len(rejected)} of {total} examples can't be used and max_rejected={max_rejected:g} "
        f"allows {allowed:g}: {'; '.join(causes)}{more} "
        f"(correct these examples{without if len(rejected) < total else ''})"
    )


def unread_words(names: Collection[str]) -> str:
    """Returns the end of a sentence with the columns and keys that aren't read."""
    if not names:
        return ""
    shown = sorted(names)[:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"; not read: {', '.join(shown)}{more}"


def placeholder_words(placeholders: Mapping[str, int]) -> str:
    """Returns a sentence on examples with placeholders of media; empty if there are none."""
    if not placeholders:
        return ""
    marks = " or ".join(placeholders)
    return (
        f"{sum(placeholders.values()):,} examples have {marks} in a question or text: it is "
        "trained as plain text. If a picture, sound or film belongs there, leave these examples out"
    )


_DESCRIPTION = "dataset_infos.json"
# A word in a file's name, as the datasets library recognises it: my_test-00000.parquet.
_OTHER_SPLIT = re.compile(
    r"(?<![a-z])(test|testing|dev|val|valid|validation|eval|evaluation)(?![a-z])"
)


def other_splits(folder: Path, files: Iterable[str]) -> list[str]:
    """Returns a folder's files that aren't for training, if it also has training files."""
    names = [file.name for file in map(Path, files) if file.parent == folder]
    others = [name for name in names if _OTHER_SPLIT.search(name.lower())]
    return others if len(others) < len(names) else []


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if saved := saved_files(path):
            return saved
        files = sorted(file for file in path.iterdir() if named(file) and not file.is_dir())
        if unusable := [file for file in files if not file.is_file()]:
            raise InputError(
                f"{unusable[0]} is a pipe, a socket, a device, or a link to nothing: remove it "
                f"from the folder {path}, or list the files"
            )
        # Next to data, a .txt file is a licence or a list of packages. Older data sets of the hub
        # have a description of their columns.
        kinds = {file: container.kind for file in files if (container := named(file))}
        files = [file for file in files if file.name != _DESCRIPTION] or files
        files = [file for file in files if kinds.get(file) != "txt"] or files
        if any(file.name == FILE for file in files):
            raise InputError(f"{path} lists its data sets: add one's name, as in {path}:NAME")
        if not files:
            inner = sorted(
                (bool(_OTHER_SPLIT.search(file.parent.name.lower())), file.parent)
                for file in path.glob("*/*")
                if named(file)
            )  # folders for training come first
            advice = f": give a folder in it, as {inner[0][1]}" if inner else ""
            raise InputError(f"the folder {path} has no file of {NAMES}{advice}")
        return files
    if not path.exists():
        if name := hub_name(str(path)):
            return hub_files(name)
        raise InputError(f"there is no file {path}{_near(path)}")
    return [path]


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f", nor a folder {path.parent}"
    close = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()])
    return f": did you mean {' or '.join(close)}?" if close else ": check the name"


def _scan(path: Path, container: Container) -> Iterator[JsonValue]:
    if container.kind in ("csv", "tsv"):
        return scan_csv(path, container)
    if container.kind in ("parquet", "arrow"):
        return scan_table(path, container)
    read = {"json": scan_json, "jsonl": scan_lines, "txt": scan_texts}[container.kind]
    return read(open_stream(path, container))


def _read_file(path: Path, columns: ColumnNames, reading: ReadExamples) -> None:
    container = container_of(path)
    examples = _scan(path, container)
    head = list(islice(examples, _LOOK))
    if not head:
        raise InputError(f"{path} is empty: it needs at least one example")
    if len(head) == 1 and (rows := _rows(path, head[0].value, columns)) is not None:
        head = [JsonValue(number, row, None) for number, row in enumerate(rows, start=1)]
    named = {*columns.names.values()}
    for json_value in head:  # such files have no known shape, so they are refused first
        with _at(path, json_value):
            refuse_other_stage(json_value.value, named, columns.stage)
    shape = _detect(path, head, columns)
    reading.shapes[str(path)] = shape
    reading.containers[str(path)] = str(container)
    expected = ALL_SHAPES.get(shape)
    needs, takes = (expected.needs, expected.takes) if expected else ((), ())
    read_columns = {*named, *columns.names, *needs, *(() if columns.shape else takes)}
    unknown = reading.unread.setdefault(str(path), set())
    placeholders = reading.placeholders.setdefault(str(path), Counter())
    for json_value in chain(head, examples):
        if json_value.lost:
            raise InputError(
                f"{path}:{json_value.line}: {json_value.reason}; {len(reading.conversations):,} "
                "examples were read before it and all that follow are lost, whatever max_rejected "
                "allows: fetch or write the file again"
            )
        try:
            if json_value.reason is not None:
                raise NoConversationError(json_value.reason)
            with _at(path, json_value):
                refuse_other_stage(json_value.value, named, columns.stage)
                example = columns.renamed(json_value.value, shape)
                made = conversation(example, shape, f"{path}:{json_value.line}")
                unknown |= unread(json_value.value | example, shape, read_columns)
        except NoConversationError as unfit:
            reading.rejected.append(Rejected(str(path), json_value.line, str(unfit)))
        else:
            reading.conversations.append(made)
            # Answers may have a placeholder of media.
            questions = (turn.content for turn in made.messages if turn.role != "assistant")
            texts = questions if made.text is None else (made.text,)
            if mark := next(filter(None, map(placeholder_in, texts)), ""):
                placeholders[mark] += 1


def _rows(path: Path, content: Any, columns: ColumnNames) -> list[Any] | None:
    """Returns the examples in a file's only object; None if the object is an example."""
    if not isinstance(content, dict):
        return None

    def shaped(example: Any) -> str | None:
        return shape_of(columns.renamed(example), columns.shapes()) if example else None

    def reads(example: dict[str, Any]) -> bool:
        # With a turn as a column, the object is one example.
        values = [content for content in example.values() if isinstance(content, dict)]
        if any(isinstance(content.get("role") or content.get("from"), str) for content in values):
            return False
        try:
            shape = shaped(example)
            return bool(shape and conversation(columns.renamed(example, shape), shape, ""))
        except (NoConversationError, InputError):
            return False

    with _at(path, JsonValue(1, content, None)):
        return examples_of(content, shaped, reads)


@contextmanager
def _at(path: Path, json_value: JsonValue) -> Iterator[None]:
    """Context in which messages about an example begin with its position."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}:{json_value.line}: {error}") from error


def _detect(path: Path, head: Sequence[JsonValue], columns: ColumnNames) -> str:
    """Returns the most frequent shape of the first examples; in a tie, the table's first."""
    objects = [json_value.value for json_value in head if isinstance(json_value.value, dict)]
    possible = columns.shapes()
    renamed = map(columns.renamed, objects)
    votes = Counter(name for example in renamed if (name := shape_of(example, possible)))
    if votes:
        return votes.most_common(1)[0][0]
    if not objects:
        return "unknown"  # every example is damaged, and is rejected with its own reason
    names = [repr(name[:40]) for name in objects[0]]
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    shown_names = ", ".join(names[:_SHOWN_KEYS]) or "(none)"
    keys = f"its first example has the keys {shown_names}{more}"
    if columns.names:
        mapping = ", ".join(f"{expected} from {name!r}" for expected, name in columns.names.items())
        raise InputError(
            f"{path} doesn't have the recipe's columns ({mapping}, for the shape "
            f"{' or '.join(possible)}): {keys}"
        )
    if columns.stage != "sft":
        raise InputError(f"{path}: {keys}; {missing_answers(objects[0], columns.stage)}")
    raise InputError(f"{path} has none of the known shapes: {keys}; {advice(objects[0])}")
