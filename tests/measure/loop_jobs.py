"""Factories of tiny loops, for processes that the tests start by name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# A child that spins until the process of that number, which started it, has gone: perhaps before
# the child asks for the first time.
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


def slow() -> Callable[[], tuple[int, float]]:
    """10 items in at least 60 ms, far above what a crowded machine adds; the loss falls."""
    losses = iter(range(1000, 0, -1))

    def step() -> tuple[int, float]:
        time.sleep(0.06)
        return 10, next(losses) / 100

    return step


def fast() -> Callable[[], int]:
    """10 items in at least 2 ms, without a loss."""

    def step() -> int:
        time.sleep(0.002)
        return 10

    return step


def raising() -> Callable[[], int]:
    raise ValueError("no such file: weights.bin")


def dying() -> Callable[[], int]:
    def step() -> int:
        print("last words", flush=True)
        os._exit(7)

    return step


def hanging() -> Callable[[], int]:
    def step() -> int:
        time.sleep(600)
        return 1

    return step


def idle() -> Callable[[], int]:
    return lambda: 0


def wordy() -> Callable[[], str]:
    return lambda: "many"


def nothing() -> None:
    return None


def spinning(note: str) -> Callable[[], int]:
    """A thread and a process that never rest; ``note`` is told the numbers of both processes."""
    child = subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())])
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    return lambda: 10
