"""Cost of sending gradients: model of a host's link, its measurement, bucket sizes.

A message of b bytes takes alpha + b / beta (Thakur, Rabenseifner, Gropp 2005,
"Optimization of Collective Communication Operations in MPICH"). With N ranks on H hosts
of R ranks each, and S bytes of a float32 tensor, a host's link carries in each direction:

- flat ring, ordered: 2 (N-1)/N S. The ring leaves each host once.
- flat ring, unordered: 2 (N-1)/N S c. The ring leaves a host c times, at most R.
- hierarchical: 2 (H-1)/H S. Each of R ranks sends a share of 1/R.
- leader: 2 (H-1)/H S. One rank sends for all ranks of its host.

A host's ranks share its link, so the host's total bytes are divided by its bandwidth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.topology import Link, Topology

FLOAT32 = 4
LATENCY_SHARE = 0.1  # largest share of latency in a bucket's time


@dataclass(frozen=True)
class Cost:
    """Seconds of one all-reduce, in two parts, and the bytes that the busiest host sends."""

    way: str
    host_bytes: float
    link_seconds: float  # time on the link between hosts
    fixed_seconds: float  # latencies, and time within hosts

    @property
    def seconds(self) -> float:
        return self.link_seconds + self.fixed_seconds

    def __str__(self) -> str:
        seconds = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{self.seconds * 1e3:.3g} ms"
        return f"{self.way}: {seconds}, {self.host_bytes / 1e6:.3g} MB per host link"


def flat(topology: Topology, numbers: int, ordered: bool = True) -> Cost:
    """Returns the cost of one ring over all ranks, host by host or in the order of rank numbers."""
    size, ranks = FLOAT32 * numbers, topology.ranks
    order = topology.order if ordered else tuple(range(ranks))
    steps, share = 2 * (ranks - 1), size / ranks
    crossings = topology.crossings(order) if ranks > 1 else 0
    name = "flat" if ordered or order == topology.order else "flat, ranks unordered"
    if not crossings:
        return Cost(name, 0.0, 0.0, steps * topology.within.seconds(share))
    sent = crossings * steps * share
    return Cost(name, sent, sent / topology.between.bandwidth, steps * topology.between.latency)


def hierarchical(topology: Topology, numbers: int) -> Cost:
    """Returns the cost of reduce-scatter within hosts, all-reduce across, all-gather within.

    Raises:
        ValueError: hosts have different numbers of ranks.
    """
    if not topology.uniform:
        raise ValueError("hierarchical needs the same number of ranks on every host")
    hosts, host_size = len(topology.hosts), len(topology.hosts[0])
    size = FLOAT32 * numbers
    sent = 2.0 * (hosts - 1) * host_size * FLOAT32 * math.ceil(numbers / topology.ranks)
    inside = 2 * (host_size - 1) * topology.within.seconds(size / host_size)
    latency = 2 * (hosts - 1) * topology.between.latency
    return Cost("hierarchical", sent, sent / topology.between.bandwidth, inside + latency)


def leader(topology: Topology, numbers: int) -> Cost:
    """Returns the cost of a reduction to one rank of each host, a ring of those, a broadcast."""
    hosts, size = len(topology.hosts), FLOAT32 * numbers
    depth = math.ceil(math.log2(max(len(host) for host in topology.hosts)))
    sent = 2 * (hosts - 1) / hosts * size
    inside = 2 * depth * topology.within.seconds(size)
    latency = 2 * (hosts - 1) * topology.between.latency
    return Cost("leader", sent, sent / topology.between.bandwidth, inside + latency)


def route_costs(topology: Topology, numbers: int, on_nccl: bool = False) -> list[Cost]:
    """Returns the costs of dense routes, cheapest first; NCCL finds rings and trees itself."""
    costs = [flat(topology, numbers)]
    if not on_nccl and topology.order != tuple(range(topology.ranks)):
        costs.append(flat(topology, numbers, ordered=False))
    several = len(topology.hosts) > 1
    if several and not on_nccl and max(map(len, topology.hosts)) > 1:
        costs.append(leader(topology, numbers))
        if topology.uniform:
            costs.append(hierarchical(topology, numbers))
    return sorted(costs, key=lambda cost: cost.seconds)


def bucket_bytes(topology: Topology) -> int:
    """Returns the bytes of the smallest bucket with at most a tenth of latency, 1 to 256 MB.

    Smaller buckets are sent earlier, larger ones waste less time. A ring of N ranks with S bytes
    takes 2 (N-1) (alpha + S / N / beta), so S = 9 N alpha beta. DDP forms its buckets before the
    first backward pass, so only the link decides.
    """
    link = topology.between if len(topology.hosts) > 1 else topology.within
    waits = (1 - LATENCY_SHARE) / LATENCY_SHARE
    if math.isinf(link.bandwidth):  # one rank: nothing is sent
        return 2**20
    wanted = waits * topology.ranks * link.latency * link.bandwidth
    return int(min(max(wanted, 2**20), 256 * 2**20))


# Measures latency and bandwidth within and between hosts by ping-pong, in under a second.
#
# 1. Two ranks of one host, then the first ranks of two hosts, exchange small messages. The fastest
# round trip is twice the latency. Then one message is sent, four times larger each time, until its
# time clearly exceeds the latency and a link's burst allowance.
# 2. All ranks of the first host send to those of the second at once, to measure the total rate.
# Ranks may share their host's link or have one each.
# 3. All ranks receive the results.

# Bytes of a message for the latency, and of the first and the largest one for the bandwidth.
SMALL, FIRST, MOST = 8, 64 * 1024, 64 * 2**20
TRIES = 8  # most round trips for the latency
SECONDS = 0.8  # duration of the measurement

Hosts = Sequence[Sequence[int]]


def measure(
    hosts: Hosts, device: str = "cpu", seconds: float = SECONDS
) -> tuple[Link | None, Link | None]:
    """Returns the links within and between hosts, the same on every rank; all ranks call it.

    Within is None if no host has two ranks. Between is None for a single host.
    """
    inside = next((tuple(host[:2]) for host in hosts if len(host) > 1), None)
    across = (hosts[0][0], hosts[1][0]) if len(hosts) > 1 else None
    within, between = (_measured_pair(pair, seconds / 3, device) for pair in (inside, across))
    if between is not None:
        link, size = between
        width = min(len(hosts[0]), len(hosts[1]))
        if width > 1:
            taken = _simultaneous_seconds(hosts, width, size, device)
            bandwidth = width * size / max(taken - 2 * link.latency, 1e-9)
            between = Link(link.latency, bandwidth), size
    return (within and within[0]), (between and between[0])


def _measured_pair(
    pair: tuple[int, ...] | None, seconds: float, device: str
) -> tuple[Link, int] | None:
    """Returns the link between two ranks and the largest size tried, on all ranks."""
    if pair is None:
        return None
    values = torch.zeros(3, dtype=torch.float64)
    if dist.get_rank() == pair[0]:
        values = torch.tensor(_lead(pair[1], seconds, device), dtype=torch.float64)
    elif dist.get_rank() == pair[1]:
        _follow(pair[0], device)
    values = values.to(device)
    dist.broadcast(values, pair[0])
    latency, bandwidth, size = values.tolist()
    return Link(latency, bandwidth), int(size)


def _lead(peer: int, seconds: float, device: str) -> tuple[float, float, int]:
    """Returns latency, bandwidth and the largest size tried; the peer runs ``_follow``."""
    end = time.perf_counter() + seconds
    _round_trip(peer, SMALL, device)  # the first message opens the connection
    small = math.inf
    for _ in range(TRIES):
        small = min(small, _round_trip(peer, SMALL, device))
        if time.perf_counter() > end - 2 * seconds / 3:
            break
    size, taken = FIRST, _round_trip(peer, FIRST, device)
    while taken < seconds / 8 and size < MOST and time.perf_counter() + 4 * taken < end:
        size *= 4
        taken = _round_trip(peer, size, device)
    _send(torch.tensor([0]), peer, device)
    return small / 2, size / max((taken - small) / 2, 1e-9), size


def _round_trip(peer: int, size: int, device: str) -> float:
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    began = time.perf_counter()
    _send(torch.tensor([size]), peer, device)
    _send(payload, peer, device)
    _receive(payload, peer, device)
    return time.perf_counter() - began


def _follow(peer: int, device: str) -> None:
    while True:
        header = torch.zeros(1, dtype=torch.int64, device=device)
        _receive(header, peer, device)
        size = int(header.item())
        if not size:
            return
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        _receive(payload, peer, device)
        _send(payload, peer, device)


def _simultaneous_seconds(hosts: Hosts, width: int, size: int, device: str) -> float:
    """Returns seconds until the slowest of ``width`` simultaneous transfers was acknowledged."""
    this_rank, taken = dist.get_rank(), 0.0
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    one_byte = torch.zeros(1, dtype=torch.uint8, device=device)
    pairs = list(zip(hosts[0][:width], hosts[1][:width], strict=True))
    for sender, receiver in pairs:  # opens the connections first
        if this_rank == sender:
            _send(one_byte, receiver, device)
        elif this_rank == receiver:
            _receive(one_byte, sender, device)
    dist.all_reduce(torch.zeros(1, device=device))  # all ranks begin together
    began = time.perf_counter()
    for sender, receiver in pairs:
        if this_rank == sender:
            _send(payload, receiver, device)
            _receive(one_byte, receiver, device)
            taken = time.perf_counter() - began
        elif this_rank == receiver:
            _receive(payload, sender, device)
            _send(one_byte, sender, device)
    slowest = torch.tensor([taken], dtype=torch.float64).to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _send(tensor: Tensor, peer: int, device: str) -> None:
    dist.send(tensor.to(device), peer)
    _synchronize(device)


def _receive(tensor: Tensor, peer: int, device: str) -> None:
    dist.recv(tensor, peer)
    _synchronize(device)


def _synchronize(device: str) -> None:
    """Waits for the device; on a processor send and recv wait themselves."""
    if not device.startswith("cpu"):
        torch.accelerator.synchronize(device)
