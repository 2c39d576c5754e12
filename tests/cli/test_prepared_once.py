"""A recipe's job is prepared once and handed on: who asks for it, in one `hasten train`."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

import hasten as package
from sample_data import small

Hasten = Callable[..., tuple[int, str, str]]
SOURCE = Path(package.__file__).parent
WATCHED = ("recipe/build.py", "recipe/prepared_data.py")
OF_THE_JOB = ("Building.", "adamw", "_adapt.")  # its factories, which the session calls


def home(frame: FrameType | None) -> str:
    """The file of this package that a call comes from."""
    while frame is not None and not frame.f_code.co_filename.startswith(str(SOURCE)):
        frame = frame.f_back
    return "" if frame is None else Path(frame.f_code.co_filename).relative_to(SOURCE).as_posix()


@pytest.mark.slow
def test_preparing_is_entered_twice_at_most(tmp_path: Path, hasten: Hasten) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small(tmp_path, max_steps=2, plan=["packed"])))
    importlib.import_module("hasten.training.run")  # loading modules is no entry

    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.endswith(WATCHED):
            return
        name = frame.f_code.co_qualname
        if name != "<module>" and not name.startswith(OF_THE_JOB):
            file = home(frame)
            if home(frame.f_back) != file:
                entered[file] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        code, _, err = hasten("train", path)
    finally:
        sys.setprofile(before)
    assert code == 0, err
    assert set(entered) == set(WATCHED)
    assert max(entered.values()) <= 2, entered
