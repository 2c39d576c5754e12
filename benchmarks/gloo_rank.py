"""A benchmark's ranks: their start, with one thread and a gloo group, and what the first found."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from netlab import Lab

ANSWER = "FOUND "  # begins the line of the answer


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


def answer(value: Any) -> None:
    """Prints what this rank found, as a line that ``answer_of`` reads of rank 0."""
    print(ANSWER + json.dumps(value), flush=True)


def answer_of(lab: Lab, command: Sequence[str], seconds: float) -> Any:
    """What rank 0 of a lab found; the ranks' output and an end if one failed."""
    results = lab.run(command, seconds=seconds)
    lines = [line for line in results[0].output.splitlines() if line.startswith(ANSWER)]
    if not lines or any(r.code for r in results):
        outputs = (f"rank {r.rank} ({r.code}) {r.reason}\n{r.output[-1500:]}" for r in results)
        raise SystemExit("\n".join(outputs))
    return json.loads(lines[-1].removeprefix(ANSWER))
