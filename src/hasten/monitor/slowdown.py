"""Why a run became slower: its last steps next to its usual ones.

The rate of the last steps is compared with the median over the whole run so far. Possible
causes are in the run's numbers: waiting for data, other ranks or the disk, and processor time
that other programs took.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hasten.formatting import number, numbers_of
from hasten.monitor.series import Series

LAST_STEPS = 20
FEWEST_STEPS = 60  # steps of a run before the usual rate is known
SLOWER = 0.8  # share of the usual rate
MORE = 0.1  # share of a step's time, or of the processor's
SLOW_RANK = 1.25  # factor of the others' median
SHARES = {
    "data_stall_share": "waiting for data takes",
    "exposed_communication_share": "waiting for other ranks takes",
}
LOADS = {
    "foreign_load": "other programs use {:.0%} of the processor",
    "disk_wait_share": "the processor waits for the disk {:.0%} of the time",
}


def slowdown(
    steps: Series,
    recent: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    slowest: Mapping[str, Any],
) -> str | None:
    """Returns a sentence with the causes in the run's files; None if it isn't slower than usual.

    Args:
        steps: of the whole run.
        recent: lines of its last steps.
        machine: the newest line about the machine.
        slowest: ``slowest_rank`` and ``slowest_rank_ratio``.
    """
    last = recent[-LAST_STEPS:]
    usual = steps.means("tokens_per_second")
    if steps.lines < FEWEST_STEPS or not usual or not last:
        return None
    rates = numbers_of(last, "tokens_per_second")
    before = statistics.median(usual)
    if not rates or before <= 0:
        return None
    rate = statistics.median(rates) / before
    if rate >= SLOWER:
        return None
    causes = _causes(steps, last, machine, slowest) or ["the run's files show no cause"]
    return f"{1 - rate:.0%} fewer tokens/s than usual: {'; '.join(causes)}"


def _causes(
    steps: Series,
    last: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    slowest: Mapping[str, Any],
) -> list[str]:
    causes = []
    for name, text in SHARES.items():
        shares = numbers_of(last, name)
        if not shares:
            continue
        now, usual = statistics.fmean(shares), statistics.median(steps.means(name) or [0.0])
        if now - usual > MORE:
            causes.append(f"{text} {now:.0%} of a step, {usual:.0%} before")
    for name, text in LOADS.items():
        load = number(machine.get(name))
        if load is not None and load > MORE:
            causes.append(text.format(load))
    ratio = number(slowest.get("slowest_rank_ratio"))
    if ratio is not None and ratio > SLOW_RANK:
        causes.append(f"rank {slowest['slowest_rank']} takes {ratio:.2f} times as long as others")
    return causes
