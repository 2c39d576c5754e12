"""A file of JSON lines that somebody else is writing, followed by offset.

A line counts once its end has been written; a half one stays for the next look. The file may be
replaced (a run that starts again takes lines out), cut, or vanish with its disk: what was read is
then forgotten and read again, and the caller is told. A replaced file is known by its number, its
size, and the bytes just before the offset, since numbers and sizes come back. Memory is bounded:
by what one look reads, and by the longest line that is believed.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOK_BYTES = 4 << 20  # of one look
LONGEST_LINE = 1 << 20
ANCHOR_BYTES = 64
NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe in the place of a file must not hold us up


@dataclass
class Look:
    """What one look found; ``anew``: it begins at the file's first line, forget what was before."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    anew: bool = False
    more: bool = False  # lines are left for the next look


class Following:
    """One file; ``look`` returns the lines since the last look.

    ``unreadable`` counts whole lines that are no JSON object; ``torn`` says that the file ends in
    the middle of a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.share = 0.0  # of the file that has been read
        self._forget()

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._offset: int = 0
        self._anchor: bytes = b""
        self._skipping = False
        self.unreadable = 0
        self.torn = False

    def look(self) -> Look:
        """Lines that were completed since.

        Raises:
            OSError: the file is there and can't be read, or its disk is gone.
        """
        try:
            handle = os.open(self.path, os.O_RDONLY | NONBLOCK)
        except FileNotFoundError:
            had = self._offset > 0
            self._forget()
            return Look(anew=had)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(f"{self.path.name} is no regular file")
        with os.fdopen(handle, "rb", buffering=0) as file:
            return self._read(file)

    def _read(self, file: Any) -> Look:
        now = os.fstat(file.fileno())
        found = Look()
        identity = (now.st_dev, now.st_ino)
        if self._offset and not self._same(file, identity, now.st_size):
            self._forget()
            found.anew = True
        self._identity = identity
        file.seek(self._offset)
        data = file.read(LOOK_BYTES) or b""
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LONGEST_LINE:  # no line that hasten writes
            self._skipping, end = True, len(data)
            self._consume(data)
        else:
            found.lines = self._parsed(data[:end])
            self._consume(data[:end])
        found.more = bool(end) and self._offset < now.st_size
        self.torn = not found.more and self._offset < now.st_size
        self.share = self._offset / now.st_size if now.st_size else 1.0
        return found

    def _parsed(self, data: bytes) -> list[dict[str, Any]]:
        found = []
        for line in data.split(b"\n")[:-1]:  # it ends with a line's end
            if self._skipping:  # the rest of the line that was too long
                self._skipping = False
                self.unreadable += 1
                continue
            value = _value(line)
            if isinstance(value, dict):
                found.append(value)
            elif line.strip():
                self.unreadable += 1
        return found

    def _consume(self, data: bytes) -> None:
        if data:
            self._offset += len(data)
            self._anchor = (self._anchor + data[-ANCHOR_BYTES:])[-ANCHOR_BYTES:]

    def _same(self, file: Any, identity: tuple[int, int], size: int) -> bool:
        if identity != self._identity or size < self._offset:
            return False
        file.seek(self._offset - len(self._anchor))
        return bool(file.read(len(self._anchor)) == self._anchor)


def _value(line: bytes) -> Any:
    if len(line) > LONGEST_LINE:
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
