"""Gradients that are compressed between hosts only: within a host they are averaged in full.

    (1) the ranks of a host average a bucket, all of them (within, first group)
    (2) one of them, another for each bucket, exchanges it with its fellows on the other hosts by
        the compressor's way, and remembers what that left out (its rail)
    (3) it gives the mean of all hosts to the ranks of its host (within, second group)

A host's link carries what one rank per host would send, and since (3) hands bits on, all ranks have
the same. The memory of what was left out lies once on each host, spread over its ranks. Within a
host a bucket travels twice instead of once; that path has to be the faster one.
"""

from __future__ import annotations

import torch.distributed as dist

from hasten.parts.comm.exchange import Ranks, WireError
from hasten.parts.comm.roll_call import RollCall
from hasten.parts.comm.topology import host_name, hosts_of


class Hosts:
    """This rank's fellows on its own host and on the others; every rank builds one.

    Raises:
        WireError: hosts have different numbers of ranks.
    """

    def __init__(
        self,
        hosts: tuple[tuple[int, ...], ...],
        seconds: float,
        backend: str | None,
        roll: RollCall,
    ) -> None:
        sizes = [len(ranks) for ranks in hosts]
        if len(set(sizes)) > 1:
            raise WireError(
                f"scope 'hosts' needs as many ranks on each host, and there are "
                f"{', '.join(map(str, sizes))}: start as many everywhere, or say scope='all'"
            )
        self.within = Ranks(seconds, backend, hosts, roll)
        self.across = Ranks(seconds, backend, list(zip(*hosts, strict=True)), roll)

    def owner(self, bucket: int) -> int:
        """The place within a host of the rank that takes a step's bucket to the others."""
        place: int = bucket % self.within.world
        return place


def found_hosts(ranks: Ranks) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, alike on all of them, which all call it."""
    names: list[str] = [""] * ranks.world
    dist.all_gather_object(names, host_name())
    return hosts_of(names)
