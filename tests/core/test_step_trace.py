"""How much of hasten a plain step runs through: it can be read, and what is off costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import hasten
from hasten.core.step import training
from tiny import language_job, session_of

SOURCE = str(Path(hasten.__file__).parent)


def test_a_plain_step_enters_few_files_and_functions() -> None:
    """The second step of one rank with one micro-batch; the first one sets things up."""
    steps = training(session_of(language_job()))
    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    next(steps)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        next(steps)
    finally:
        sys.setprofile(before)
    assert len({file for file, _ in entered}) <= 10, sorted(entered)
    assert len(entered) <= 65, sorted(entered)
