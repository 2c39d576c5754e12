"""What earlier studies of similar jobs tell before the first trial: a forecast that was measured.

Two jobs are similar if their records say the same of what they are `about` (architecture, device
and objective; of a loop, its name). Settings that both know are matched by name and value; what an
earlier study measured is believed half, since the job is another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.tune.belief import Belief
from hasten.tune.space import Point, Space

BELIEVED = 0.5
FEWEST = 3  # trials, or nothing is learnt
VAGUE = 0.05  # added to the noise of another job's measurement


def similar_trials(folder: Path, about: Mapping[str, Any], but: str) -> list[dict[str, Any]]:
    """Trials of a folder's studies that are about the same; a damaged record is passed over."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/record.jsonl")):
        if path.parent.name == but:
            continue
        try:
            events = [json.loads(line) for line in path.read_text().splitlines()]
            if any(e.get("event") == "about" and e.get("what") == about for e in events):
                found += [e for e in events if e.get("event") == "tried" and e["state"] == "ok"]
        except (OSError, ValueError, AttributeError, KeyError):
            continue
    return found


def learnt(
    space: Space, trials: Sequence[Mapping[str, Any]], forecast: Callable[[Point], float]
) -> Callable[[Point], float]:
    """The forecast as earlier trials correct it; itself where they are too few.

    Their values are over a start of their own: what is told is over this one's, which is 0.
    """
    seen, values = [], []
    for trial in trials:
        try:
            seen.append(space.point(trial["settings"]))
        except InputError:
            continue  # a setting that this job doesn't have
        values.append(float(trial["log_rate"]))
    if len(seen) < FEWEST:
        return forecast
    believed = Belief(space, forecast, VAGUE).after(seen, values)
    known: dict[Point, float] = {}

    def corrected(point: Point) -> float:
        if point not in known:
            points = [point] if known else [*space.points(), point]  # most will be asked for
            known.update(zip(points, map(float, believed(points).mean), strict=True))
        before = forecast(point)
        return before + BELIEVED * (known[point] - before)

    first = corrected(space.start)
    return lambda point: corrected(point) - first
