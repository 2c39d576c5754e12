"""Files that are replaced atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hasten.errors import InputError

TEMPORARY = ".*.part"  # pattern of temporary files, which a killed process may leave


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a new file that replaces ``path`` if the context ends without an error.

    Without ``durable`` a power cut may leave a damaged file; a crash of the process doesn't.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Writes a text file atomically in UTF-8; unsupported characters become ``\udcff``."""
    with replacing(path, durable) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_result(path: Path, text: str) -> None:
    """Writes a file that a user requested atomically; creates its folder if missing.

    Raises:
        InputError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise InputError(
            f"{path} can't be written: {error.strerror or error}; make room, or name another place"
        ) from error
