"""The ledger of a run: where a step's time goes, whose the memory is, how even the steps are.

Times come from the clock at the step's seams (:mod:`hasten.core.timing`), which a run has to start
with; without one nothing was counted and every time is None. Memory takes one pass of its own,
outside the training: ask for the ledger when the run's last step is done and its techniques have
been asked what they did.
"""

from __future__ import annotations

from typing import Any

from hasten.core.session import Session
from hasten.core.timing import HostClock, split, stability, step_total
from hasten.machine import host
from hasten.measure.ledger_memory import memory_of

WARMUP = 2  # first steps: they compile, allocate and read what later ones find ready


def ledger_of(session: Session, warmup: int = WARMUP) -> dict[str, Any]:
    """The keys of an arm's ``ledger`` in the report. All ranks call it together.

    Args:
        warmup: steps to leave out at the beginning, as long as others remain.
    """
    setup = session.setup
    every = list(setup.clock.steps)
    steps = every[warmup:] or every
    return {
        "step": split(steps, session.saves),
        "memory": memory_of(session),
        "stability": stability([step_total(step) for step in steps]),
        "utilisation": utilisation(session, warmup),
    }


def utilisation(session: Session, warmup: int = WARMUP) -> float | None:
    """Share of the device's time that was used: of all usable cores, or as a GPU's driver says.

    On a processor it is that of this process with all its threads, and one that waits awake counts
    as busy, which is why fast code and much waiting may have the same figure.
    """
    clock = session.setup.clock
    if not isinstance(clock, HostClock):
        return host.device_utilisation(session.setup.job.device)
    keep = warmup if len(clock.steps) > warmup else 0
    whole = sum(step_total(step) for step in list(clock.steps)[keep:])
    return sum(list(clock.busy)[keep:]) / whole / host.usable_cores() if whole else None
