"""Output of the command line; control characters from files or models don't reach a terminal."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TextIO

import typer

from hasten.errors import StoppedError
from hasten.formatting import shown


class _Terminal(io.FileIO):
    """A terminal; if the user closes it during the command, further output is dropped."""

    def write(self, buffer: Any) -> int:
        try:
            return super().write(buffer)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(buffer).nbytes


def prepare_streams() -> None:
    """Prepares stdout and stderr for text that a terminal can't encode, and for closed terminals.

    Names may have bytes that aren't UTF-8, and some terminals show only ASCII.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.errors in ("strict", None):
            stream.reconfigure(errors="backslashreplace")
        if stream.isatty():
            file = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            options: dict[str, Any] = {
                key: getattr(stream, key)
                for key in ("encoding", "errors", "line_buffering", "write_through")
            }
            setattr(sys, name, io.TextIOWrapper(file, **options))


def say(
    *texts: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Prints as `print` does; control characters and marks of direction are escaped.

    Raises:
        StoppedError: the output can't be written. A pipe without a reader is BrokenPipeError.
    """
    try:
        print(shown(sep.join(map(str, texts))), end=end, file=file, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(error.strerror or str(error)) from error


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    unbroken: Collection[str] = (),
) -> None:
    """Prints a table as wide as the terminal; long cells have several lines.

    Cells of the columns ``unbroken`` have one line.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in unbroken)
    for row in rows:
        table.add_row(*row)
    width = None if Console().is_terminal else 120
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)


def unwritable(reason: str) -> StoppedError:
    """Returns the error that ends a command if the output can't be written."""
    return StoppedError(f"the output can't be written: {reason}; name another place")


def was_printing(error: Exception) -> bool:
    """Returns True if the error arose while typer printed a help text."""
    code = typer.echo.__code__
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is code for frame, _ in frames)


def dropped_output(stream: TextIO | None) -> str:
    """Drops output that a stream can't write, and returns why; empty if all is written.

    Output that stays in the stream would raise again when the interpreter ends.
    """
    if stream is None:  # closed before the start
        return ""
    try:
        stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return error.strerror or str(error)
    return ""
