"""Factories of tiny loops, for processes that the tests start by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def slow() -> Callable[[], tuple[int, float]]:
    """10 items in at least 8 ms; the loss falls."""
    losses = iter(range(1000, 0, -1))

    def step() -> tuple[int, float]:
        time.sleep(0.008)
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
        time.sleep(60)
        return 1

    return step


def idle() -> Callable[[], int]:
    return lambda: 0


def wordy() -> Callable[[], str]:
    return lambda: "many"


def nothing() -> None:
    return None
