"""Labs for tests: ``lab_with_links`` gives one with links, or skips and says what is missing."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.cluster.netlab import Lab
from hasten.errors import InputError

JOBS = Path(__file__).with_name("netlab_jobs.py")


def lab_with_links(**settings: Any) -> Lab:
    """A lab to be entered, with links whose rate can be set, or a skip with the reason."""
    switch = bool(settings.get("delay_ms") or settings.get("loss"))
    if reason := _missing(switch):
        pytest.skip(reason)
    return Lab(**settings)


@functools.cache
def _missing(switch: bool) -> str:
    try:
        with Lab(2, 1, "1gbit", delay_ms=0.1 if switch else 0.0):
            return ""
    except InputError as error:
        return str(error)


def job(name: str, *numbers: float) -> list[str]:
    """The command line of a function in ``netlab_jobs``."""
    return [sys.executable, "-W", "ignore", str(JOBS), name, *map(str, numbers)]
