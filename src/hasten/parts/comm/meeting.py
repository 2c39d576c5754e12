"""Where ranks meet: they compare settings, find out who shares a host, and open their groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.error_feedback import Pieces
from hasten.parts.comm.exchange import Ranks
from hasten.parts.comm.hosts import Hosts, found_hosts
from hasten.parts.comm.settings import Settings
from hasten.parts.comm.travel import Travel
from hasten.parts.comm.ways import Way


class Meeting:
    """``ranks`` are None until several ranks have met; ``hosts`` where only these exchange
    compressed gradients, and there are several ranks on each of several hosts."""

    def __init__(self, settings: Settings, seconds: float, backend: str | None) -> None:
        self.ranks: Ranks | None = None
        self.hosts: Hosts | None = None
        self.count = 0  # of hosts with several ranks, where hosts are the scope
        self._settings, self._seconds, self._backend = settings, seconds, backend

    def meet(self, travel: Travel, group: dist.ProcessGroup | None = None) -> None:
        """At the first call with several ranks; every rank calls it, each with its own ``group``.

        Raises:
            ValueError: hosts are the scope, and the group has some of the ranks.
            WireError: their settings differ, or hosts have different numbers of ranks.
        """
        running = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not running or self.ranks is not None:
            return
        members = _everybodys(group)
        if members and self._settings.scope == "hosts":
            raise ValueError("scope 'hosts' is for gradients of all ranks; say scope='all'")
        self.ranks = Ranks(self._seconds, self._backend, members)
        self.ranks.agree(asdict(self._settings))
        if self._settings.scope == "hosts":
            hosts = found_hosts(self.ranks)
            travel.quiet = len(hosts) == 1  # nothing is between hosts
            self.count = len(hosts) if len(hosts) < self.ranks.world else 0
            if self.count > 1:
                self.hosts = Hosts(hosts, self._seconds, self._backend, self.ranks.roll)

    @property
    def sent_bytes(self) -> int:
        """By this rank for gradients: to other hosts, where these are the scope."""
        ranks = self.ranks if self.hosts is None else self.hosts.across
        return 0 if ranks is None else ranks.sent_bytes

    @property
    def world(self) -> int:
        """How many exchange compressed gradients: ranks, or hosts."""
        if self.hosts is not None:
            return self.hosts.across.world
        if self.ranks is not None:
            return self.ranks.world
        running = dist.is_available() and dist.is_initialized()
        return int(dist.get_world_size()) if running else 1

    def send(
        self, travel: Travel, flat: Tensor, pieces: Pieces, ranks: Ranks, way: Way
    ) -> Callable[[], Tensor]:
        """A bucket on its way; what is returned waits for its mean."""
        if self.hosts is None:
            return travel.send(flat, pieces, ranks, way)
        return travel.send_between(flat, pieces, self.hosts, way)


def _everybodys(group: dist.ProcessGroup | None) -> list[tuple[int, ...]] | None:
    """The ranks of each rank's group, every group once; None where one group has all ranks."""
    world = dist.get_world_size()
    if group is None or dist.get_world_size(group) == world:
        return None
    told: list[tuple[int, ...]] = [()] * world
    dist.all_gather_object(told, tuple(dist.get_process_group_ranks(group)))
    return sorted(set(told))
