"""Conversations stored on disk during preparation, and selections without copies.

Examples are written directly into a spool. Memory holds the position of each example,
eight bytes, and nothing of its content. Weights, `max_examples` and `eval_data` are
rows of a `Selection`: an example that an epoch trains twice is one example of the
spool. Each example is parsed once, from any container. If a file changes meanwhile,
nothing changes here.

A packed example is a pickle. One preparation of the data writes and reads it, and
deletes it at its end. No other process's file is ever unpickled.
"""

from __future__ import annotations

import os
import pickle
import shutil
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from hasten.data.conversation import Conversation
from hasten.data.turns import Message, ToolCall

_BUFFER = 1 << 16  # bytes: examples that follow each other are read without a system call each


class IndexedConversations(Protocol):
    """Conversations by position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Conversation: ...


class ConversationSink(IndexedConversations, Protocol):
    """Receives examples as they are read: a list, or a spool."""

    def append(self, conversation: Conversation, /) -> None: ...
    def __iter__(self) -> Iterator[Conversation]: ...


class Spool(Sequence[Conversation]):
    """Conversations in a file: appended to, then read by position."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=_BUFFER)
        self._ends = array("q", [0])  # example i is bytes ends[i] to ends[i + 1] - 1
        self._at_end = True

    def append(self, conversation: Conversation) -> None:
        if not self._at_end:
            self._file.seek(0, os.SEEK_END)
            self._at_end = True
        self._file.write(packed := pack(conversation))
        self._ends.append(self._ends[-1] + len(packed))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Conversation]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Selection([self], np.arange(len(self), dtype=np.int64)[index])
        return unpack(self.packed(range(len(self))[index]))

    def packed(self, index: int) -> bytes:
        """The bytes of one example, 0 <= index < len."""
        first, last = self._ends[index], self._ends[index + 1]
        self._at_end = False
        self._file.seek(first)
        return self._file.read(last - first)

    def close(self) -> None:
        self._file.close()


class Selection(Sequence[Conversation]):
    """Examples of several groups laid end to end, in the order of `rows`, each as often as
    named.
    """

    def __init__(
        self, groups: Sequence[IndexedConversations], rows: NDArray[np.int64] | None = None
    ) -> None:
        self._groups = groups
        self._firsts = [0, *accumulate(map(len, groups))]
        everything = np.arange(self._firsts[-1], dtype=np.int64)
        self.rows = everything if rows is None else np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Conversation]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Selection(self._groups, self.rows[index])
        group, at = self._locate(index)
        return group[at]

    def take(self, indices: NDArray[np.int64]) -> Selection:
        """Returns the examples at these positions of the selection."""
        return Selection(self._groups, self.rows[indices])

    def packed(self, index: int) -> bytes:
        """Returns the bytes of one example."""
        return packed(*self._locate(index))

    def _locate(self, index: int) -> tuple[IndexedConversations, int]:
        row = int(self.rows[index])
        group = bisect_right(self._firsts, row) - 1
        return self._groups[group], row - self._firsts[group]


def pack(conversation: Conversation) -> bytes:
    """Returns a conversation as bytes, which are equal for equal content.

    The bytes have no class names, because they are part of the key of prepared data.
    """
    fields: tuple[Any, ...] = _plain(conversation.messages), conversation.text
    fields += (conversation.location,)
    if conversation.answers is not None:
        fields += ([_plain(a) if isinstance(a, tuple) else a for a in conversation.answers],)
    return pickle.dumps(fields, 5)


def _plain(messages: tuple[Message, ...]) -> list[tuple[Any, ...]]:
    return [(*turn[:2], [tuple(call) for call in turn.calls], *turn[3:]) for turn in messages]


def unpack(packed_bytes: bytes) -> Conversation:
    """Returns the conversation in the bytes of `pack`."""
    turns, text, location, *pairs = pickle.loads(packed_bytes)
    answers = [_turns(a) if isinstance(a, list) else a for pair in pairs for a in pair]
    pair = (answers[0], answers[1]) if answers else None
    return Conversation(_turns(turns), text, location, pair)


def _turns(plain: list[Any]) -> tuple[Message, ...]:
    return tuple(
        Message(role, content, tuple(ToolCall(*call) for call in calls), *more)
        for role, content, calls, *more in plain
    )


def packed(conversations: IndexedConversations, index: int) -> bytes:
    """One example of any sequence as bytes, as they lie on disk where they do."""
    if isinstance(conversations, Spool | Selection):
        return conversations.packed(index)
    return pack(conversations[index])


class Spools:
    """Makes the spools of one preparation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.made: list[Spool] = []

    def new(self) -> Spool:
        self.made.append(Spool(self._folder / f"{next(self._numbers)}.spool"))
        return self.made[-1]


@contextmanager
def spools(folder: Path) -> Iterator[Spools]:
    """Spools below `folder/reading`, which is empty before and gone after.

    A preparation that was killed leaves the folder behind; the next one begins with removing it.
    """
    reading_folder = folder / "reading"
    shutil.rmtree(reading_folder, ignore_errors=True)
    reading_folder.mkdir(parents=True)
    spool_set = Spools(reading_folder)
    try:
        yield spool_set
    finally:
        for spool in spool_set.made:
            spool.close()
        shutil.rmtree(reading_folder, ignore_errors=True)
