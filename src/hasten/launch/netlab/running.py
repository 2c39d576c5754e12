"""A command that runs on a lab's ranks, and how each rank ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a rank ended: its exit code (negative: the signal; None: never started) and its words.

    ``reason`` is empty unless the lab ended it.
    """

    rank: int
    host: int
    code: int | None
    output: str
    reason: str = ""


class Running:
    """A command that runs on a lab's ranks."""

    def __init__(
        self, ask: Callable[..., dict[str, Any]], ranks: int, job: int, place: Path
    ) -> None:
        self._ask, self._ranks, self._job, self.place = ask, ranks, job, place

    def done(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self._ask("poll", job=self._job, seconds=0)["done"])

    def end(self) -> None:
        """Have all ranks ended; ``wait`` gives the results."""
        self._ask("end", job=self._job)

    def log(self, rank: int) -> Path:
        """The file into which a rank speaks, while it runs too."""
        return self.place / f"rank-{rank}.log"

    def wait(self) -> list[Result]:
        """The results, by rank. The time limit given at the start ends a job that hangs."""
        while not (found := self._ask("poll", job=self._job, seconds=2.0))["done"]:
            pass
        return [
            Result(rank, rank // self._ranks, code, self._words(rank), found["reason"])
            for rank, code in enumerate(found["codes"])
        ]

    def _words(self, rank: int) -> str:
        path = self.log(rank)
        return path.read_text(errors="replace") if path.exists() else ""
