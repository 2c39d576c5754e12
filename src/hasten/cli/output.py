"""Output of the command line: no text of others gives an order to the terminal."""

from __future__ import annotations

import os
from typing import TextIO

from hasten.errors import StoppedError
from hasten.formatting import shown


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


def unwritable(reason: str) -> StoppedError:
    """The error that ends a command if the output can't be written."""
    return StoppedError(f"the output can't be written: {reason}; name another place")


def dropped_output(stream: TextIO | None) -> str:
    """Drops what a stream can't write, and returns why; empty if everything is written.

    What stays in it would fail once more when the interpreter ends.
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
