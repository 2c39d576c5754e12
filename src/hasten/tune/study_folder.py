"""A study's files and its result, for studies of speed and of learning.

The folder output/studies/KEY has these files:

- record.jsonl: Every trial. A second start resumes from it.
- best.yaml: The best settings so far, replaced atomically after every better trial.
- study.json, study.html: The study, with charts of history and importance.

KEY is the hash of everything that decides the numbers: recipe, data, space, machine,
versions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.foreign_files import read_json_object
from hasten.machine.cache import key_of
from hasten.machine.files import write_atomic
from hasten.machine.locks import alone_in
from hasten.measure.record import ExperimentRecord
from hasten.progress import Audience
from hasten.tune.report import page


@dataclass(frozen=True)
class StudyResult:
    """A study's result; `str` is one sentence about it.

    The field ``settings`` has those to use: the winner's, or the start's if nothing was
    significantly better. The field ``text`` is the recipe with them (for a loop: its
    arguments as JSON).
    """

    report: dict[str, Any]
    settings: dict[str, Any]
    text: str
    folder: Path

    @property
    def better(self) -> bool:
        """Returns True if a point was significantly better."""
        return self.report["winner"] is not None

    def __str__(self) -> str:
        return str(self.report["said"])


class StudyFolder:
    """The files of one study.

    Args:
        output: the run's folder.
        decisive: everything that decides the numbers; a record of anything else is refused.
        audience: receives messages about results of an earlier start.
    """

    def __init__(self, output: str | Path, decisive: Mapping[str, Any], audience: Audience) -> None:
        self._key, self._audience = key_of(decisive), audience
        self.path = Path(output) / "studies" / self._key

    @contextlib.contextmanager
    def opened(self, fresh: bool) -> Iterator[ExperimentRecord]:
        """The record, for one process at a time; ``fresh`` begins a new one.

        Raises:
            InputError: the folder can't be written.
        """
        path = self.path / "record.jsonl"
        with alone_in(self.path, self._audience.tell):
            if fresh:
                path.unlink(missing_ok=True)
            with ExperimentRecord(path, self._key) as record:
                yield record

    def run(
        self,
        fresh: bool,
        study: Callable[[ExperimentRecord], dict[str, Any]],
        is_complete: Callable[[dict[str, Any]], bool],
    ) -> dict[str, Any]:
        """The study's JSON: of an earlier start that has finished it, else of ``study``.

        A study that isn't complete is kept, and a second start does what it lacks.
        """
        path, tell = self.path / "study.json", self._audience.tell
        with self.opened(fresh) as record:
            if record.done and path.is_file():
                tell(f"studied before: {self.path} (--fresh measures anew)")
                return read_json_object(path, "study")
            if any(event["event"] in ("trial", "trained") for event in record.events):
                tell(f"going on with {self.path}")
            document = study(record)
            write_atomic(path, json.dumps(document, indent=1))
            text = page(document, document["title"], document["said"])
            write_atomic(self.path / "study.html", text)
            if is_complete(document):
                record.append("done")
        return document

    def keep_best(self, text: str) -> None:
        """``text`` as the best recipe so far."""
        write_atomic(self.path / "best.yaml", text)
