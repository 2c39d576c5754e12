"""What a technique asks of a session before it offers a setting to be changed while it runs.

The peak of memory so far is that of a run whose settings stood still, so what a change would add is
set against what is left below it.
"""

from __future__ import annotations

from itertools import islice

import torch

from hasten.core.session import Session
from hasten.machine.environment import ranks_here
from hasten.machine.memory import memory_meter
from hasten.techniques.feed import PrefetchedFeed

FULL = 0.8  # share of the memory that a change may lead to
STEPS = 64  # of the order that are looked through


def steps_read_ahead(session: Session) -> int:
    """Steps that may have been cut and laid out already."""
    feed = session.setup.feed
    if not isinstance(feed, PrefetchedFeed) or feed.prefetcher is None:
        return 0
    return feed.prefetcher.statistics.lookahead + 1


def fits(session: Session, more: float) -> bool:
    """Whether every rank could use so many bytes more than ever so far; all ranks ask together."""
    used, limit = memory_meter(session.setup.job.device)()
    on_host = session.setup.job.device.startswith("cpu")
    ranks = ranks_here(session.setup.facts.world) if on_host else 1
    mine = torch.tensor([float(ranks * (used + more) <= FULL * limit)], dtype=torch.float64)
    return bool(session.setup.agreement.sum(mine).item() == session.setup.layout.size)


def largest_micro_batch(session: Session) -> int:
    """Slots of the largest one in many steps of this rank's order; 0 where there is no order."""
    setup, layout = session.setup, session.setup.layout
    if setup.sampler is None or not len(setup.job.records):
        return 0
    collate, records, found = setup.collate or setup.job.collate, setup.job.records, 0
    steps = setup.sampler.local_steps(session.progress.epoch, layout.data_rank, layout.data_size)
    for pieces in islice(steps, STEPS):
        for piece in pieces:
            for part in setup.cut([records[i] for i in piece]) if piece else ():
                found = max(found, collate(part).counts.slots)
    return found
