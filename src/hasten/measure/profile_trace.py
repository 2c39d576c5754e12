"""The trace of a profiled step: Chrome's trace format, compressed, of bounded size.

``trace.json.gz`` opens in https://ui.perfetto.dev or chrome://tracing. A step with very many
operators keeps its longest events; how many were left out is said in the profile.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "trace.json.gz"
MOST_EVENTS = 100_000  # some 2 MB compressed; a viewer in the browser stays quick


def keep_trace(
    export: Callable[[str], object], folder: Path, most: int = MOST_EVENTS
) -> dict[str, Any]:
    """Let the profiler ``export``, cut what it wrote to size, and put it into ``folder``.

    The file appears complete or not at all; an earlier one is replaced.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".trace-") as place:
        raw = Path(place) / "raw.json"
        export(str(raw))
        trace = json.loads(raw.read_bytes())
        kept = longest(trace["traceEvents"], most)
        dropped = len(trace["traceEvents"]) - len(kept)
        part = Path(place) / NAME
        with gzip.open(part, "wt", encoding="utf-8") as file:
            json.dump({**trace, "traceEvents": kept}, file)
        part.replace(folder / NAME)
    return {"file": NAME, "events": len(kept), "left_out": dropped}


def longest(events: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The longest ``most`` events with a duration in their order; all names of rows are kept."""
    timed = [e.get("dur", 0.0) for e in events if e.get("ph") == "X"]
    if len(timed) <= most:
        return [e for e in events if e.get("ph") in ("X", "M")] if len(events) > most else events
    limit = sorted(timed, reverse=True)[most - 1]
    room = most - sum(d > limit for d in timed)
    kept = []
    for event in events:
        if event.get("ph") == "M":
            kept.append(event)
        elif event.get("ph") == "X" and event.get("dur", 0.0) >= limit:
            if event.get("dur", 0.0) == limit:
                room -= 1
                if room < 0:
                    continue
            kept.append(event)
    return kept
