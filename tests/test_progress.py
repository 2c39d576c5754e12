"""Progress is reported where it can be, and what reports it never ends the work."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from hasten.progress import Display


class Unwritable(io.StringIO):
    """A log on a full disk, or a pipe whose reader has ended."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, "not written")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_log_that_takes_no_line_ends_no_work(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Unwritable(number))
    with Display() as display:
        display.tell("a line")
        display.show("a state", 1.0)
