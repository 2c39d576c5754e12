"""The processes that a test has started, as against the server that they are forked from."""

from __future__ import annotations

import psutil

import warm


def children() -> list[psutil.Process]:
    """This process's children, but for the server of ``warm``."""
    return started_by(None)


def started_by(number: int | None) -> list[psutil.Process]:
    """The same of the process with this number."""
    return [child for child in psutil.Process(number).children() if not _serves(child)]


def _serves(process: psutil.Process) -> bool:
    try:
        return process.name() == warm.NAME.decode()
    except psutil.Error:  # over already
        return False
