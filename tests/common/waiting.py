"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any]) -> bool:
    """Whether it came within a minute; the bound only decides how long a failure takes."""
    end = time.monotonic() + 60
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return bool(found)
