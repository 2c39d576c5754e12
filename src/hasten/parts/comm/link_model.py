"""What sending gradients costs each way, from latency and bandwidth: alpha-beta, one host's link.

A message of b bytes takes alpha + b / beta (Thakur, Rabenseifner, Gropp 2005, "Optimization of
Collective Communication Operations in MPICH"). With N ranks on H hosts of R, a tensor of S bytes
in float32, and m(n) the bytes of a codec's message for n numbers, a host's link carries each way

    flat ring, ordered   2 (N-1)/N S        each step of the ring leaves a host once
    flat ring, unordered 2 (N-1)/N S c      or c times, at most R
    hierarchical         2 (H-1)/H S        R ranks each send a share of 1/R
      with a codec       2 (H-1) R m(S/4/N)
    leader               2 (H-1)/H S        one rank for all of its host

A host's ranks share its link, so its bandwidth divides what the whole host sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hasten.parts.comm.topology import Topology

FLOAT32 = 4
WORTH = 0.05  # a gain below it isn't worth a change
LATENCY_SHARE = 0.1  # of a bucket's time, beyond which buckets are too small


@dataclass(frozen=True)
class CodecModel:
    """What a codec makes of n numbers, and how fast: bytes of float32 per second, either way."""

    name: str
    message_bytes: Callable[[int], int]
    bytes_per_second: float


@dataclass(frozen=True)
class Cost:
    """Seconds of one all-reduce, in three parts, and the bytes that the busiest host sends."""

    way: str
    codec: str
    host_bytes: float
    link_seconds: float  # the bytes on the link between hosts
    fixed_seconds: float  # latencies, and what happens within hosts
    codec_seconds: float

    @property
    def seconds(self) -> float:
        return self.link_seconds + self.fixed_seconds + self.codec_seconds

    def exposed(self, overlap: float) -> float:
        """What of it nothing hides, where ``overlap`` seconds of computation run beside it."""
        return max(0.0, self.seconds - overlap)

    def __str__(self) -> str:
        name = self.way if self.codec == "none" else f"{self.way} {self.codec}"
        return f"{name}: {_time(self.seconds)}, {self.host_bytes / 1e6:.3g} MB per host link"


def flat(topology: Topology, numbers: int, ordered: bool = True) -> Cost:
    """One ring over all ranks, host by host or in their numbers' order."""
    size, ranks = FLOAT32 * numbers, topology.ranks
    order = topology.order if ordered else tuple(range(ranks))
    steps, share = 2 * (ranks - 1), size / ranks
    crossings = topology.crossings(order) if ranks > 1 else 0
    name = "flat" if ordered or order == topology.order else "flat, ranks unordered"
    if not crossings:
        return Cost(name, "none", 0.0, 0.0, steps * topology.within.seconds(share), 0.0)
    sent = crossings * steps * share
    return Cost(
        name, "none", sent, sent / topology.between.bandwidth, steps * topology.between.latency, 0.0
    )


def hierarchical(topology: Topology, numbers: int, codec: CodecModel | None = None) -> Cost:
    """Reduce-scatter within hosts, the same and all-gather across, all-gather within.

    Raises:
        ValueError: hosts have different numbers of ranks.
    """
    if not topology.uniform:
        raise ValueError("hierarchical needs the same number of ranks on every host")
    hosts, here = len(topology.hosts), len(topology.hosts[0])
    size, piece = FLOAT32 * numbers, math.ceil(numbers / topology.ranks)
    message = FLOAT32 * piece if codec is None else codec.message_bytes(piece)
    sent = 2.0 * (hosts - 1) * here * message
    inside = 2 * (here - 1) * topology.within.seconds(size / here)
    latency = 2 * (hosts - 1) * topology.between.latency
    coded = 0.0
    if codec is not None and hosts > 1:
        # Encode a share, decode the fellows' pieces, encode their mean, decode the whole share.
        coded = FLOAT32 * piece * (3 * hosts + 1) / codec.bytes_per_second
    return Cost(
        "hierarchical",
        "none" if codec is None else codec.name,
        sent,
        sent / topology.between.bandwidth,
        inside + latency,
        coded,
    )


def leader(topology: Topology, numbers: int) -> Cost:
    """Reduce to one rank of each host, a ring of those, broadcast: fewest messages."""
    hosts, size = len(topology.hosts), FLOAT32 * numbers
    depth = math.ceil(math.log2(max(len(host) for host in topology.hosts)))
    sent = 2 * (hosts - 1) / hosts * size
    inside = 2 * depth * topology.within.seconds(size)
    latency = 2 * (hosts - 1) * topology.between.latency
    return Cost("leader", "none", sent, sent / topology.between.bandwidth, inside + latency, 0.0)


def ways(
    topology: Topology, numbers: int, codecs: Iterable[CodecModel] = (), on_nccl: bool = False
) -> list[Cost]:
    """What each way costs here, cheapest first.

    NCCL finds rings, trees and rank order itself; there only what travels is left to decide.
    """
    costs = [flat(topology, numbers)]
    if not on_nccl and topology.order != tuple(range(topology.ranks)):
        costs.append(flat(topology, numbers, ordered=False))
    several = len(topology.hosts) > 1
    if several and not on_nccl and max(map(len, topology.hosts)) > 1:
        costs.append(leader(topology, numbers))
        if topology.uniform:
            costs.append(hierarchical(topology, numbers))
    if several and topology.uniform:
        costs += [hierarchical(topology, numbers, codec) for codec in codecs]
    return sorted(costs, key=lambda cost: cost.seconds)


def break_even(dense: Cost, small: Cost) -> float:
    """Bytes per second of a host's link above which ``small`` takes longer than ``dense``.

    0 where it never pays, infinity where it always does; overlap doesn't change it.
    """
    saved = dense.host_bytes - small.host_bytes
    extra = small.fixed_seconds + small.codec_seconds - dense.fixed_seconds - dense.codec_seconds
    if saved <= 0:
        return 0.0
    return saved / extra if extra > 0 else math.inf


def gain(dense: Cost, small: Cost, compute: float, overlap: float) -> float:
    """Share of a step's time that ``small`` saves; ``overlap`` of ``compute`` hides traffic."""
    before = compute + dense.exposed(overlap)
    after = compute + small.exposed(overlap)
    return (before - after) / before if before > 0 else 0.0


def bucket_bytes(topology: Topology) -> int:
    """The smallest bucket of which latency takes at most a tenth: delay x bandwidth.

    Smaller buckets leave earlier, larger ones waste less; between 1 and 256 MB. A ring of N steps
    with S bytes takes 2 (N-1) (alpha + S / N / beta), so S = 9 N alpha beta.
    """
    link = topology.between if len(topology.hosts) > 1 else topology.within
    waits = (1 - LATENCY_SHARE) / LATENCY_SHARE
    if math.isinf(link.bandwidth):  # nothing to send over
        return 2**20
    wanted = waits * topology.ranks * link.latency * link.bandwidth
    return int(min(max(wanted, 2**20), 256 * 2**20))


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
