"""Progress is reported where it can be, and what reports it never ends the work."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from hasten.cli.output import show_table
from hasten.formatting import one_line
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


@pytest.mark.parametrize("text", [":x: a/b:smile:c", "[red]a[/red] [link=a]b[/link]", "[b"])
def test_texts_are_shown_to_the_letter(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_table([text], [[text]], title=text)
    assert capsys.readouterr().out.count(text) == 3
    for terminal in (False, True):
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)
        monkeypatch.setattr(errors, "isatty", lambda terminal=terminal: terminal, raising=False)
        with Display(by_thread=False) as display:
            display.tell(text)
            display.show(text, 0.5)
            display.show(text, 1.0)
        assert text in errors.getvalue()


def test_a_long_reason_of_a_library_ends_after_a_whole_word() -> None:
    assert one_line(ValueError("some\nwords " * 2), 21) == "some words some words"
    assert one_line(ValueError("some\nwords " * 2), 20) == "some words some ..."
    assert one_line(ValueError()) == "ValueError"
