"""What takes turns on the clock, and what a turn did."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """What a turn did: tokens, their pairs, and seconds where the variant has a clock of its
    own.
    """

    tokens: int
    pairs: int
    seconds: float | None = None


class Variant(Protocol):
    """What takes turns of some steps."""

    def steps(self, count: int) -> Work: ...
