"""The process groups of a topology: a host's ranks, fellows across hosts, all in order, leaders.

Each stage of a collective has a group of its own, so that messages of two stages can't be mixed up.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hasten.parts.comm.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Those that this rank is in; ``across`` is None where hosts have unequal numbers of ranks."""

    within: Any
    across: Any
    ordered: Any
    leaders: Any

    @classmethod
    def opened(cls, topology: Topology, seconds: float) -> Groups:
        """Open them; every rank calls it. ``seconds`` is how long a collective may take."""
        rails = list(zip(*topology.hosts, strict=True)) if topology.uniform else []
        return cls(
            within=own_of(topology.hosts, seconds),
            across=own_of(rails, seconds),
            ordered=own_of([topology.order], seconds),
            leaders=own_of([tuple(host[0] for host in topology.hosts)], seconds),
        )


def moves_by_nccl(group: Any = None) -> bool:
    """Whether NCCL moves what lies on GPUs in this group; gloo may move the host's beside it."""
    return "nccl" in dist.get_backend(group)


def own_of(groups: Iterable[tuple[int, ...]], seconds: float, backend: str | None = None) -> Any:
    """Open these groups, ranks in the order given; this rank's own of them, or None."""
    found = None
    for ranks in groups:
        limit = datetime.timedelta(seconds=seconds)
        # gloo's ring goes by the ranks' places in the group, so they aren't to be sorted.
        group = dist.new_group(list(ranks), timeout=limit, backend=backend, sort_ranks=False)
        found = group if dist.get_rank() in ranks else found
    return found
