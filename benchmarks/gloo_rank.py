"""The start of a rank that a benchmark runs in: one thread, and a gloo group with the others."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist


def join(minutes: float = 10.0, own_core: bool = False, place: int | None = None) -> int:
    """Joins the ranks that hasten started on this machine, and returns this one's number.

    ``own_core`` binds it to a core; ``place`` is another number for it in the group.
    """
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if own_core and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HASTEN_RENDEZVOUS']}",
        rank=rank if place is None else place,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(minutes=minutes),
    )
    return rank
