"""Collectives that average gradients over all ranks or between hosts, and count sent bytes.

Two threads must not issue collectives on the same process group. Ranks may issue them in
different orders, and messages would mix up. So each of the two stages has its own group.
The thread that computes gradients uses the first group, in the order in which DDP's
buckets become full, which is the same on all ranks. The thread that waits for buckets, in
the same order, uses the second group (:mod:`hasten.parts.comm.groups`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm import groups
from hasten.parts.comm.groups import movable, open_own_group
from hasten.parts.comm.rank_check import CollectiveError, RankReports
from hasten.parts.comm.topology import host_name, hosts_of

FIRST, SECOND = 0, 1  # stages


class CommunicationError(CollectiveError):
    """Gradients can't be sent: a rank has ended, hangs, or has other settings."""


@dataclass
class Pending:
    """A collective in progress; without a ``work`` it is done."""

    work: Any
    result: Tensor

    def wait(self) -> Tensor:
        """Returns its result; on a processor this thread waits, on a GPU its stream does."""
        if self.work is not None:
            self.work.wait()
        return self.result


class Ranks:
    """Two process groups over all ranks, or over this rank's group in ``members``.

    All ranks construct it together. ``rank`` and ``world`` are those within the group.
    ``backend`` None: that of the default group.

    ``reports`` finds the missing ranks after a failed exchange; None: it is constructed here.
    """

    def __init__(
        self,
        seconds: float,
        backend: str | None = None,
        members: Sequence[tuple[int, ...]] | None = None,
        reports: RankReports | None = None,
    ) -> None:
        everyone = tuple(range(dist.get_world_size()))
        self.reports = reports or RankReports("gradients", everyone, seconds)
        every = members or [everyone]
        self._groups = [open_own_group(every, seconds, backend) for _ in (FIRST, SECOND)]
        self.rank: int = dist.get_rank(self._groups[FIRST])
        self.world: int = dist.get_world_size(self._groups[FIRST])
        self._sent = [0, 0]  # sent bytes by stage, because a thread counts for each

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that this rank sent to others in the collectives' algorithms."""
        return sum(self._sent)

    def all_to_all(self, rows: Tensor) -> Pending:
        """Sends row r of ``rows`` (ranks, bytes) to rank r; the result's row r came from it."""
        received = torch.empty_like(rows)
        self._sent[FIRST] += rows.nbytes // self.world * (self.world - 1)
        work = groups.all_to_all(received, rows, self._groups[FIRST])
        return Pending(work, received)

    def all_gather(self, row: Tensor, stage: int) -> Pending:
        """Returns every rank's row, as (ranks, bytes)."""
        rows = torch.empty(self.world * len(row), dtype=row.dtype, device=row.device)
        self._sent[stage] += gathered_bytes(row.nbytes, self.world)
        work = groups.all_gather(rows, row, self._groups[stage])
        return Pending(work, rows.view(self.world, -1))

    def all_reduce(self, values: Tensor, stage: int) -> Pending:
        """Sums over ranks, in place."""
        self._sent[stage] += reduced_bytes(values.nbytes, self.world)
        return Pending(dist.all_reduce(values, group=self._groups[stage], async_op=True), values)

    def give(self, values: Tensor, giver: int) -> None:
        """Broadcasts the ``values`` of a rank of the group; waits."""
        group = self._groups[SECOND]
        source = dist.get_global_rank(group, giver)
        if self.rank == giver:
            self._sent[SECOND] += gathered_bytes(values.nbytes, self.world)
        dist.broadcast(values, source, group=group)

    def failed(self, error: Exception) -> CommunicationError:
        """Returns the exception for a failed gradient exchange, with the rank concerned."""
        if isinstance(error, CommunicationError):
            return error
        failure = self.reports.failed("averaging gradients", error)
        return CommunicationError(str(failure), failure.missing)

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Checks that all ranks have rank 0's settings.

        Raises:
            CommunicationError: settings differ; the message names the rank and the setting.
        """
        first, *others = groups.gathered_objects(dict(settings), self._groups[FIRST])
        for rank, rank_settings in enumerate(others, start=1):
            for key in sorted({*first, *rank_settings}):
                if first.get(key) != rank_settings.get(key):
                    raise CommunicationError(
                        f"ranks must compress gradients alike: rank {rank} has {key} "
                        f"{rank_settings.get(key)!r} and rank 0 has {first.get(key)!r}"
                    )

    def differing(self, checksum: int) -> list[int]:
        """Returns the ranks with another checksum than rank 0; the same list on every rank."""
        checksums = self.gathered(torch.tensor([checksum])).flatten().tolist()
        return [rank for rank, value in enumerate(checksums) if value != checksums[0]]

    def gathered(self, values: Tensor) -> Tensor:
        """Returns every rank's ``values`` as rows on the host; not counted as sent gradients."""
        values = movable(values, self._groups[FIRST])
        rows = values.new_empty(self.world * len(values))
        groups.all_gather(rows, values, self._groups[FIRST]).wait()
        return rows.view(self.world, -1).cpu()


def reduced_bytes(size: int, world: int) -> int:
    """Returns the bytes that a rank sends in a ring sum of ``size`` bytes: 2 (W - 1) / W."""
    return 2 * size * (world - 1) // world


def gathered_bytes(size: int, world: int) -> int:
    """Returns the bytes that a rank sends in an all-gather: W - 1 rows."""
    return size * (world - 1)


# Gradients that are compressed between hosts only: within a host they are averaged in full.
#
# 1. The ranks of a host average a bucket (within, first group).
# 2. One of them, another for each bucket, exchanges it with the other hosts by the compressor's
# method, and stores the errors.
# 3. It broadcasts the mean of all hosts to the ranks of its host (within, second group).
#
# A host's link carries the messages of one rank per host. All ranks have the same bits, because (3)
# copies them. The error memory exists once on each host, divided over its ranks. Within a host a
# bucket is sent twice instead of once, so that link must be the faster one.


class Hosts:
    """Groups of this rank within its host and between hosts; all ranks construct it together.

    Raises:
        CommunicationError: hosts have different numbers of ranks.
    """

    def __init__(
        self,
        hosts: tuple[tuple[int, ...], ...],
        seconds: float,
        backend: str | None,
        reports: RankReports,
    ) -> None:
        sizes = [len(ranks) for ranks in hosts]
        if len(set(sizes)) > 1:
            raise CommunicationError(
                f"scope 'hosts' needs the same number of ranks on each host, and the hosts have "
                f"{', '.join(map(str, sizes))}: start the same number on each, or set scope='all'"
            )
        self.within = Ranks(seconds, backend, hosts, reports)
        self.across = Ranks(seconds, backend, list(zip(*hosts, strict=True)), reports)


def found_hosts(ranks: Ranks) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each host, equal on all ranks, which all call it."""
    return hosts_of(groups.gathered_objects(host_name()))
