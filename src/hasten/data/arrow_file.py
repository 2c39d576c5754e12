"""The file of token examples: an Arrow stream with a digest.

    [Arrow stream: input_ids list<int32>, trained list<bool>] [JSON summary] [its size] [digest]

The digest covers all bytes before it, so that a truncated or changed file is detected before it is
used. Arrow's own readers stop at the end of the stream and ignore the following bytes.
Reading maps the file: ids are views of the mapping, marks are unpacked from their bits on demand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from hasten.machine.files import replacing, sync
from hasten.parts.data.collate import TokenizedExample

SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("trained", pa.list_(pa.bool_()))],
    metadata={"hasten": "token examples 1"},
)
_BATCH_TOKENS = 1 << 20  # tokens of an example batch, which a writer has in memory
_CHUNK = 1 << 24  # bytes per read while hashing
_SIZE_BYTES = 8
_DIGEST_BYTES = 16


class DamagedError(ValueError):
    """A file that has changed since it was written."""


class Batch(NamedTuple):
    """One example batch of the mapped file; example i is `ids[starts[i] : starts[i + 1]]`."""

    starts: NDArray[np.int32]  # (examples + 1,)
    ids: NDArray[np.int32]  # (tokens,)
    bits: NDArray[np.uint8]  # (tokens / 8, rounded up), first token in the lowest bit

    def record(self, row: int) -> TokenizedExample:
        first, last = int(self.starts[row]), int(self.starts[row + 1])
        return TokenizedExample(self.ids[first:last], self.marks(first, last))

    def marks(self, first: int, last: int) -> NDArray[np.bool_]:
        """Returns the marks of tokens first to last - 1, as a new array."""
        bits = np.unpackbits(self.bits[first // 8 : (last + 7) // 8], bitorder="little")
        return bits[first % 8 :][: last - first].view(np.bool_)


def write(
    path: Path,
    examples: Iterable[TokenizedExample],
    summarise: Callable[[], Any] = dict,
    durable: bool = True,
) -> None:
    """Writes examples to `path`, which has either its old or its new content at any time.

    `summarise()` is called after the last example; it returns the JSON summary for `read`. Without
    `durable`, a power cut may leave a damaged file; a crash of the process doesn't. Raises OSError
    if the file can't be written.
    """
    _write(path, _batches(examples), summarise, durable)


def merge(path: Path, parts: Iterable[Path], summarise: Callable[[list[Any]], Any]) -> None:
    """Joins the examples of complete files in one, with one part in memory at a time.

    `summarise` returns the summary for those of the parts. Raises DamagedError or OSError.
    """
    summaries: list[Any] = []

    def batches() -> Iterator[Any]:
        for part in parts:
            summaries.append(_proven(part))
            with pa.memory_map(str(part)) as mapped, pa.ipc.open_stream(mapped) as stream:
                yield from stream

    _write(path, batches(), lambda: summarise(summaries), durable=True)


def _write(path: Path, batches: Iterable[Any], summarise: Callable[[], Any], durable: bool) -> None:
    with replacing(path, durable) as file:
        with pa.ipc.new_stream(pa.PythonFile(file, "w"), SCHEMA) as writer:
            for batch in batches:
                writer.write_batch(batch)
        summary = json.dumps(summarise()).encode()
        file.write(summary + len(summary).to_bytes(_SIZE_BYTES, "little"))
        file.write(_digest(file, file.tell()))
    if durable and os.name == "posix":  # other systems can't sync a folder
        sync(path.parent)


def read(path: Path) -> tuple[list[Batch], Any]:
    """Returns the mapped batches of a file, and its summary; raises DamagedError or OSError."""
    summary = _proven(path)
    with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
        batches = []
        for batch in stream:
            ids, trained = batch.columns
            packed = trained.values.buffers()[1]
            bits = np.zeros(0, np.uint8) if packed is None else np.frombuffer(packed, np.uint8)
            batches.append(Batch(ids.offsets.to_numpy(), ids.values.to_numpy(), bits))
        return batches, summary


def digest_of(path: Path) -> bytes:
    """Returns the digest at the end of a complete file; may raise OSError."""
    with path.open("rb") as file:
        file.seek(-_DIGEST_BYTES, os.SEEK_END)
        return file.read()


def is_whole(path: Path) -> bool:
    """Returns True if the file exists and is as it was written; may raise OSError."""
    try:
        _proven(path)
    except (FileNotFoundError, DamagedError):
        return False
    return True


def _proven(path: Path) -> Any:
    """Returns the summary of a file after a check of its digest."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END) - _DIGEST_BYTES
        if end < _SIZE_BYTES or _digest(file, end) != file.read(_DIGEST_BYTES):
            raise DamagedError(f"{path} is damaged")
        file.seek(end - _SIZE_BYTES)
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        file.seek(end - _SIZE_BYTES - size)
        return json.loads(file.read(size))


def _batches(examples: Iterable[TokenizedExample]) -> Iterator[Any]:
    pending: list[TokenizedExample] = []
    tokens = 0
    for example in examples:
        pending.append(example)
        tokens += example.length
        if tokens >= _BATCH_TOKENS:
            yield _batch(pending)
            pending, tokens = [], 0
    if pending:
        yield _batch(pending)


def _batch(examples: list[TokenizedExample]) -> Any:
    starts = pa.array(np.cumsum([0, *(example.length for example in examples)], dtype=np.int32))
    ids = pa.array(np.concatenate([example.input_ids for example in examples]))
    trained = pa.array(np.concatenate([example.trained for example in examples]))
    lists = (pa.ListArray.from_arrays(starts, values) for values in (ids, trained))
    return pa.record_batch(list(lists), schema=SCHEMA)


def _digest(file: IO[bytes], end: int) -> bytes:
    """Returns the hash of the first `end` bytes; the file's position is then `end`."""
    file.seek(0)
    digest = xxhash.xxh3_128()
    while end > 0 and (chunk := file.read(min(end, _CHUNK))):
        digest.update(chunk)
        end -= len(chunk)
    return bytes(digest.digest())
