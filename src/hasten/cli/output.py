"""Output of the command line: no text of others gives an order to the terminal."""

from __future__ import annotations

from typing import TextIO

from hasten.formatting import shown


def say(
    *texts: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Prints as `print` does; control characters and marks of direction are escaped."""
    print(shown(sep.join(map(str, texts))), end=end, file=file, flush=flush)
