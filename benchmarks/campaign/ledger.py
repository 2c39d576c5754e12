"""The campaign's results: a line of JSON for each batch that is done, so that it may stop anywhere.

A batch that was cut off leaves no line and is done again, with the same draws: they follow from the
names of trainer and fault and the number of the batch.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class NotHereError(Exception):
    """This machine can't be used for a fault: nothing was found, good or bad."""


Outcome = dict[str, Any]  # of a case: good, kind, words, numbers
Line = dict[str, Any]
SHOWN = 5  # words of cases that weren't good, of each batch


@dataclass
class Tally:
    """What all batches of one fault on one trainer say together."""

    cases: int = 0
    good: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    words: list[str] = field(default_factory=list)
    skipped: str = ""  # why there is nothing

    def add(self, line: Line) -> None:
        self.skipped = line["skipped"]
        self.cases += line["cases"]
        self.good += line["good"]
        self.kinds.update(line["kinds"])
        self.words += line["words"]
        for name, values in line["numbers"].items():
            self.numbers[name] += values


class Ledger:
    """The lines of one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.lines = read(self.path)
        self._lock = threading.Lock()

    def tally(self, trainer: str, fault: str) -> Tally:
        found = Tally()
        for line in self.lines:
            if (line["trainer"], line["fault"]) == (trainer, fault):
                found.add(line)
        return found

    def numbers(self, trainer: str, fault: str) -> set[int]:
        """Of the batches that are done."""
        return {
            line["batch"]
            for line in self.lines
            if (line["trainer"], line["fault"]) == (trainer, fault) and not line["skipped"]
        }

    def add(self, line: Line) -> None:
        """Keep a line, in one write."""
        with self._lock, self.path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
            self.lines.append(line)


def read(path: Path) -> list[Line]:
    """The whole lines of a file; half a one, of a writer that was killed, is cut off."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def line_of(
    trainer: str, fault: str, batch: int, seconds: float, found: Mapping[str, Any], about: Any
) -> Line:
    """A batch's line, of what ``batch`` wrote."""
    outcomes: list[Outcome] = found["outcomes"]
    bad = [f"{o['kind']}: {o['words']}" for o in outcomes if not o["good"]]
    return {
        "trainer": trainer,
        "fault": fault,
        "batch": batch,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "cases": len(outcomes),
        "good": sum(o["good"] for o in outcomes),
        "kinds": dict(Counter(o["kind"] for o in outcomes)),
        "words": bad[:SHOWN],
        "numbers": _numbers(outcomes),
        "skipped": found.get("skipped", ""),
        "about": about,
    }


def _numbers(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.get("numbers", {}).items():
            found[name].append(round(value, 3))
    return found
