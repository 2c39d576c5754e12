"""Events of a run, each as a sentence: restarts, skipped steps, spikes, another plan.

The sentences contain text from the run's files, which any program may have written. So
texts are cut, and must be escaped where they are shown.
"""

from __future__ import annotations

import errno
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hasten.foreign_files import open_regular
from hasten.formatting import number

LARGEST = 8 << 20  # bytes of a JSON file; a larger one isn't read
KEPT = 200  # newest events of each kind that are stored
LONGEST = 300  # characters of a sentence
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """An event: ``kind`` is its file or cause; ``bad`` events need a person's attention."""

    kind: str
    step: float | None
    text: str
    bad: bool = False


class Events:
    """The newest events of each kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, deque[Event]] = {}
        self.count = 0

    def add(self, event: Event | None) -> None:
        """Adds an event; None is ignored."""
        if event is not None:
            self._kinds.setdefault(event.kind, deque(maxlen=KEPT)).append(event)
            self.count += 1

    def forget(self, kind: str) -> None:
        if self._kinds.pop(kind, None):
            self.count += 1

    def newest(self, most: int = KEPT) -> list[dict[str, Any]]:
        """Returns events of all kinds, the last step first, after events without a step."""
        events = [event for kind in self._kinds.values() for event in kind]
        events.sort(key=lambda e: float("inf") if e.step is None else e.step, reverse=True)
        return [asdict(event) for event in events[:most]]


def of_restart(line: Line) -> Event:
    rank = line.get("rank")
    who = "a rank" if rank is None else f"rank {short(rank)}"
    cause = short(line.get("cause") or "no cause was written down")
    text = f"attempt {short(line.get('attempt'))} failed, {who}: {cause}"
    return Event("restart", number(line.get("step")), text, True)


def of_spike(line: Line) -> Event:
    limit = number(line.get("limit"))
    above = "" if limit is None else f" above {limit:.4g}"
    return Event("spike", number(line.get("step")), f"loss{above}: {short(line.get('did'))}", True)


def of_quarantine(line: Line) -> Event:
    examples = line.get("examples")
    count = f"{len(examples)} examples" if isinstance(examples, list) else "its examples"
    text = f"rank {short(line.get('rank'))}: not finite, {count} written down"
    return Event("quarantined", number(line.get("step")), text, True)


def of_adjustment(line: Line) -> Event | None:
    """Returns the event of a changed setting; None for one that was tried and reverted."""
    if not line.get("kept"):
        return None
    ratio = line.get("ratio")
    mean = number(ratio.get("mean")) if isinstance(ratio, Mapping) else None
    gain = "" if mean is None else f", {mean:.2f}x tokens/s"
    change = f"{short(line.get('from'))} -> {short(line.get('to'))}"
    text = short(f"{short(line.get('setting'))}: {change}{gain}")
    return Event("adjusted", number(line.get("step")), text)


def of_plan(now: Any, before: Any) -> Event | None:
    """Returns an event with the techniques that changed since the previous run, or None."""
    new_techniques, old_techniques = techniques(now), techniques(before)
    if new_techniques == old_techniques:
        return None
    differences = [f"+ {name}" for name in new_techniques if name not in old_techniques]
    differences += [f"- {name}" for name in old_techniques if name not in new_techniques]
    differences += [
        f"{name}: {short(old_techniques[name])} -> {short(new_techniques[name])}"
        for name in new_techniques
        if name in old_techniques and new_techniques[name] != old_techniques[name]
    ]
    return Event(
        "plan", None, short(f"other switches than the run before: {', '.join(differences)}")
    )


def techniques(plan: Any) -> dict[str, Any]:
    """Returns name -> settings of a plan in its file form, a list of techniques."""
    by_technique: dict[str, Any] = {}
    for entry in plan if isinstance(plan, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("technique"), str):
            settings = dict(entry)
            by_technique[settings.pop("technique")] = settings
    return by_technique


def earlier_plan(folder: Path) -> Any:
    """Returns the plan of the newest run in ``previous/N``; None without one."""
    try:
        numbers = [int(p.name) for p in (folder / "previous").iterdir() if p.name.isdigit()]
        return read_object(folder / "previous" / str(max(numbers)) / "run.json").get("plan")
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Returns a file's JSON object; empty if the file is missing, incomplete, or something else.

    Raises:
        OSError: the file exists and can't be read.
    """
    try:
        value = json.loads(read_bytes(path, LARGEST))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_bytes(path: Path, most: int) -> bytes:
    """Returns a file's bytes; empty if it is missing, has more than ``most``, or is a link.

    A link may lead out of the run's folder.

    Raises:
        OSError: the file exists and can't be read.
    """
    try:
        with open_regular(path, follow_links=False) as file:
            content = file.read(most + 1)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return b""
    return content if len(content) <= most else b""


def lines_of(value: Any, most: int) -> str:
    """Returns a value as text of at most ``most`` characters; line ends and tabs stay."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    cut = text if len(text) <= most else text[: most - 4] + " ..."
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in cut)


def short(value: Any) -> str:
    """Returns a value as short text on one line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 4] + " ..."
