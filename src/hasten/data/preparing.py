"""Conversations become one file of token records, chunk by chunk, with nothing done twice.

  (1) conversations are cut into chunks by number and size alone, never by who will work on them
  (2) each chunk becomes a file in `<key>.parts`, whole or absent, written by any worker in any
      order; the folder is the manifest: what lies there whole is done
  (3) when all lie there they are joined in order, and the folder goes

So the result is the same, byte by byte, for any number of workers and after any number of kills,
and memory holds one chunk per worker however many there are. Parts that nobody comes back for, as
the settings have changed, are swept once data with other settings is ready.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hasten.data import arrow_file
from hasten.data.onewriter import if_free
from hasten.data.spool import Indexed, packed
from hasten.data.worker import Chunk, Work
from hasten.data.workers import Task, run

_CHUNK_RECORDS = 1 << 10  # about a quarter of a second of one core
_CHUNK_BYTES = 1 << 22  # of packed conversations, where those are long
_WORTH_A_WORKER = 8  # chunks: a process takes about a second to load its libraries


class _Span(NamedTuple):
    """Conversations first to last - 1, and where their records go."""

    first: int
    last: int
    part: Path


def prepare(
    conversations: Indexed,
    work: Work,
    path: Path,
    workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Write `path`, going on where an earlier call for it ended; the caller is the only writer.

    Raises InputError where a conversation, or a worker, fails; OSError where the disk does.
    """
    folder = path.with_suffix(".parts")
    folder.mkdir(exist_ok=True)
    spans = list(_spans(conversations, folder))
    left = [span for span in spans if not arrow_file.is_whole(span.part)]
    total = len(conversations)
    done = total - sum(span.last - span.first for span in left)
    if on_progress and done:
        on_progress(done, total)
    tasks = (_task(conversations, span) for span in left)
    workers = min(workers, max(len(left) // _WORTH_A_WORKER, 1))
    with closing(run(work, tasks, workers)) as finished:
        for size in finished:
            done += size
            if on_progress:
                on_progress(done, total)
    arrow_file.merge(path, (span.part for span in spans), _summary)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what ended preparations in `folder` left half done; never a living one's.

    Each key's lock tells whether its preparation lives. What can't be removed stays.
    """
    try:
        left = [path for path in folder.iterdir() if path.suffix in (".parts", ".tmp")]
        for path in left:
            with if_free(folder / f"{path.name.partition('.')[0]}.lock") as free:
                if free and path.suffix == ".parts":
                    shutil.rmtree(path, ignore_errors=True)
                elif free:
                    path.unlink(missing_ok=True)
    except OSError:
        return  # it is only room on the disk


def _spans(conversations: Indexed, folder: Path) -> Iterator[_Span]:
    first = size = number = 0
    for at in range(len(conversations)):
        size += len(packed(conversations, at))
        if size >= _CHUNK_BYTES or at + 1 - first == _CHUNK_RECORDS:
            yield _Span(first, at + 1, folder / f"{number:08}.arrow")
            first, size, number = at + 1, 0, number + 1
    if first < len(conversations):
        yield _Span(first, len(conversations), folder / f"{number:08}.arrow")


def _task(conversations: Indexed, span: _Span) -> Task:
    def load() -> Chunk:
        return Chunk(span.part, [packed(conversations, at) for at in range(span.first, span.last)])

    places = f"{conversations[span.first].place} to {conversations[span.last - 1].place}"
    name = f"the chunk of records {span.first + 1:,} to {span.last:,} ({places})"
    return Task(name, span.last - span.first, load)


def _summary(parts: list[Any]) -> dict[str, Any]:
    return {
        "rejected": [row for part in parts for row in part["rejected"]],
        "long": sum(part["long"] for part in parts),
    }
