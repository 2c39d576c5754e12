"""Files and texts of others: no pipe is waited for, and no terminal obeys a text."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_regular(path: Path) -> BinaryIO:
    """A file's bytes; raises OSError for a pipe, whose writer may never come, or a device."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def shown(text: str) -> str:
    """The text with control characters other than tabs and line ends as `\\x1b`."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)
