"""An experiment against itself at another time: which switch gains less than it did.

A switch's gain is a ratio to a baseline that ran in the same rounds, so it can be compared across
days and even installations, where speeds can't. The two experiments are independent: their
logarithmic ratios are compared by Welch's interval (1947), which doesn't take both to vary alike.

An interval over rounds doesn't know what changes from one start to the next (memory layout, the
neighbours of the day). That is what the margin is for: a switch has lost where all of the interval
lies below 1 - margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hasten.errors import InputError
from hasten.measure.statistics import Interval, paired_ratio, unpaired_ratio
from hasten.report.bundle import Measurement

MARGIN = 0.02
Word = Literal["lost", "gained", "same", "inconclusive", "not measured"]


@dataclass(frozen=True)
class Change:
    """What became of one arm: its ratio to the baseline before and now, and now over before."""

    name: str
    verdict: Word
    before: Interval | None = None
    now: Interval | None = None
    ratio: Interval | None = None
    reason: str = ""


def changes(
    before: Mapping[str, Measurement], now: Mapping[str, Measurement], margin: float = MARGIN
) -> list[Change]:
    """Every arm but the baseline, the first.

    Args:
        before: the stored rounds by arm.
        now: those of today.
        margin: the share of a gain that may go without being called lost.

    Raises:
        InputError: a margin outside [0, 1).
    """
    if not 0 <= margin < 1:
        raise InputError(f"--margin is a share from 0 up to 1, not {margin:g}")
    (base, _), *others = before.items()
    missing = Measurement(failed="it wasn't measured")
    found = [_change(name, stored, now.get(name, missing), margin) for name, stored in others]
    without = now[base].failed if base in now else None
    if without is None:
        return found
    reason = f"the baseline failed: {without}"  # whatever became of the arm itself
    return [replace(c, reason=reason) if c.verdict == "lost" else c for c in found]


def lost(found: Sequence[Change]) -> list[str]:
    """The names of the arms that lost."""
    return [change.name for change in found if change.verdict == "lost"]


def _change(name: str, before: Measurement, now: Measurement, margin: float) -> Change:
    if before.failed is not None or not before.ratios:
        reason = f"it had no result then: {before.failed or 'no rounds'}"
        return Change(name, "not measured", now=_span(now), reason=reason)
    then, today = _span(before), _span(now)
    if now.failed is not None or not now.ratios:
        return Change(name, "lost", then, None, None, f"it failed: {now.failed or 'no rounds'}")
    ratio = unpaired_ratio(before.ratios, now.ratios)
    idle = sorted(set(now.idle) - set(before.idle))
    if idle:
        return Change(name, "lost", then, today, ratio, f"{', '.join(idle)} no longer acts")
    return Change(name, _word(ratio, margin), then, today, ratio)


def _word(ratio: Interval, margin: float) -> Word:
    if ratio.high < 1 - margin:
        return "lost"
    if ratio.low > 1 + margin:
        return "gained"
    if ratio.low >= 1 - margin and ratio.high <= 1 + margin:
        return "same"
    return "inconclusive"


def _span(measured: Measurement) -> Interval | None:
    if measured.failed is not None or not measured.ratios:
        return None
    count = len(measured.ratios)
    return paired_ratio(measured.beside[:count], measured.rounds[:count])
