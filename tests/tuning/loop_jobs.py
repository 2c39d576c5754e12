"""Loops that do nothing but wait: their speed is known."""

from __future__ import annotations

import time
from collections.abc import Callable


def job(batch: int = 1, fused: bool = False) -> Callable[[], int]:
    """Larger batches and fused ones are faster, by more than a crowded machine adds to a wait."""

    def step() -> int:
        time.sleep(0.002 if fused else 0.02 / batch**2)
        return 1

    return step


def alike(batch: int = 1) -> Callable[[], int]:
    def step() -> int:
        time.sleep(0.01)  # long beside what a crowded machine adds to it
        return 1

    return step


def failing(batch: int = 1) -> Callable[[], int]:
    if batch > 1:
        raise RuntimeError(f"no kernel for {batch}")
    return alike()


def greedy(batch: int = 1) -> Callable[[], int]:
    if batch > 2:
        raise MemoryError(f"out of memory at {batch}")
    return job(batch)
