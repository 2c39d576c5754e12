"""The processes that a test has started, as against the one that its ranks are forked from."""

from __future__ import annotations

import psutil

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # see ranks.py


def children() -> list[psutil.Process]:
    """This process's children, but for the server of ranks and what comes with it."""
    return [child for child in psutil.Process().children() if not _serves(child)]


def _serves(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:  # over already
        return False
    return any(name in command for name in SERVERS)
