"""Which arms are alive at the same time: all, groups that share the baseline, or one at a time.

An arm that waits for its turn sleeps, but keeps its memory. So arms start one by one, and the next
one starts only if, going by what those before it really took, it will fit as well. Those that don't
fit are in a later cohort, with the baseline started afresh beside them. Where not even the baseline
and one arm fit, every turn has a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hasten.measure.ablation import Design
from hasten.measure.record import Event

SHARE = 0.92  # of the memory that is available: caches of the system want some, too
GROUP = 3  # arms beside the baseline, where groups were asked for


def fits(alive: Sequence[str], peaks: Mapping[str, int], name: str, memory: int) -> bool:
    """Whether one more arm can start; one never seen is taken for the largest seen."""
    if not peaks:
        return True
    unknown = max(peaks.values())
    return sum(peaks.get(n, unknown) for n in (*alive, name)) <= SHARE * memory


def may_join(
    alive: Sequence[str], peaks: Mapping[str, int], name: str, memory: int, design: Design
) -> bool:
    """Whether an arm starts beside those that are alive, in the grouping that was asked for."""
    if design.grouping == "together" or not alive:
        return True
    holds = fits(alive, peaks, name, memory)
    if design.grouping == "groups":  # the baseline and one more always start
        return len(alive) == 1 or (len(alive) <= GROUP and holds)
    return holds


def words(events: Sequence[Event]) -> str:
    """Which arms were alive together, for the report."""
    fresh = any(e["event"] == "cohort" and e.get("fresh") for e in events)
    if fresh:
        return (
            "a fresh process for every turn: two arms didn't fit into memory, or it was asked for"
        )
    groups: dict[tuple[str, ...], None] = {}
    for e in events:
        if e["event"] == "cohort":
            groups[tuple(e["members"])] = None
    if len(groups) <= 1:
        count = len(next(iter(groups), ()))
        return f"all {count} arms alive together"
    return "groups that share the baseline: " + "; ".join(", ".join(g) for g in groups)


def all_fit(names: Sequence[str], peaks: Mapping[str, int], memory: int, design: Design) -> bool:
    """Whether all of these have been alive before, and memory holds them together."""
    return all(name in peaks for name in names) and all(
        may_join(names[:i], peaks, name, memory, design) for i, name in enumerate(names)
    )
