"""Plan of a topology-aware collective: rank 0 makes it once for all ranks.

Every rank sends its host and its settings. If ranks have different settings, all raise
the same error before anything else is sent. Rank 0 uses the given topology or measures
it. It chooses an algorithm for each tensor size and broadcasts the choice to the other
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import require_real
from hasten.formatting import did_you_mean
from hasten.machine.host import has_cuda
from hasten.parts.comm import groups
from hasten.parts.comm.codecs import Codec
from hasten.parts.comm.codecs import codec as codec_called
from hasten.parts.comm.groups import moves_by_nccl, own_accelerator
from hasten.parts.comm.link_model import (
    bucket_bytes,
    measure,
    route_costs,
)
from hasten.parts.comm.methods import ErrorMemory
from hasten.parts.comm.topology import (
    Link,
    Topology,
    check_name,
    gpu_link,
    hosts_of,
    with_detected_links,
    with_named_links,
)

# The two halves of an all-reduce in one group, without or with a codec.
#
# - scatter_sum: each rank gets every rank's version of one piece and adds them in rank order
# - gather: each rank's piece is sent to all. With a codec all ranks decode the same bytes, the
# owner of a piece too, so results have the same bits on all ranks.
#
# A codec's messages are never summed as codes. They are decoded, added in float32 and encoded
# again: two roundings for any number of ranks. Non-finite numbers reach every rank as such.

HALVES = (torch.bfloat16, torch.float16)
Group = Any  # torch.distributed.ProcessGroup


def scatter_sum(
    numbers: Tensor,
    group: Group,
    codec: Codec | None = None,
    memory: ErrorMemory | None = None,
    name: str = "",
    cut: bool = True,
) -> Tensor:
    """Returns this rank's piece of the sum over the group; ``numbers`` has one piece per rank.

    With a codec the result is float32. ``memory`` stores the codec's errors under ``name``.
    ``cut``: large messages are sent in pieces, which pays on links between hosts.
    """
    size = group.size()
    if size == 1:
        return numbers
    if codec is None:
        return _dense_sum(numbers, group, size, cut)
    sent = _encoded(numbers, size, codec, memory, name)
    received = torch.empty_like(sent)
    groups.all_to_all(received, sent, group, cut).wait()
    return codec.decode_mean(received, numbers.numel() // size).mul_(size)


def gather(
    shard: Tensor,
    group: Group,
    codec: Codec | None = None,
    memory: ErrorMemory | None = None,
    name: str = "",
    cut: bool = True,
) -> Tensor:
    """Returns all ranks' pieces end to end, by rank; with a codec, float32 as decoded."""
    size, count = group.size(), shard.numel()
    if size == 1:
        return shard
    if codec is None:
        gathered = shard.new_empty(size * count)
        groups.all_gather(gathered, shard, group, cut).wait()
        return gathered
    sent = _encoded(shard, 1, codec, memory, name)
    received = sent.new_empty((size, sent.shape[1]))
    groups.all_gather(received, sent, group, cut).wait()
    gathered = shard.new_empty(size * count, dtype=torch.float32)
    for row, target in zip(received, gathered.view(size, count), strict=True):
        codec.decode(row, count, target)
    return gathered


def sum_across(share: Tensor, group: Group) -> Tensor:
    """Returns the sum of ``share`` over the group, by torch's all-reduce.

    With gloo it took 0.9 s, because its ring sends in segments. The two halves one after the other
    took 1.3 s (benchmarks/log.md).
    """
    if group.size() > 1:
        share = share.contiguous()
        dist.all_reduce(share, group=group)
    return share


def sent_bytes(shard: Tensor, group: Group, codec: Codec | None) -> int:
    """Returns the bytes that one rank sends in either half: one message per other rank."""
    message = shard.nbytes if codec is None else codec.message_bytes(shard.numel())
    return message * int(group.size() - 1)


def _dense_sum(numbers: Tensor, group: Group, size: int, cut: bool) -> Tensor:
    if numbers.device.type != "cpu" and moves_by_nccl(group):
        shard = numbers.new_empty(numbers.numel() // size)
        groups.reduce_scatter(shard, numbers, group=group)
        return shard
    # With gloo an all-to-all and a sum in rank order give bits that don't depend on a ring's
    # direction. Formats of 16 bits are added in float32 and rounded once.
    received = torch.empty_like(numbers)
    groups.all_to_all(received, numbers, group, cut).wait()
    half = numbers.dtype in HALVES
    total = received.view(size, -1).sum(0, dtype=torch.float32 if half else numbers.dtype)
    return total.to(numbers.dtype)


def _encoded(
    numbers: Tensor, pieces: int, codec: Codec, memory: ErrorMemory | None, name: str
) -> Tensor:
    """Returns one message per piece, as rows."""
    exact = numbers if numbers.dtype in (torch.float32, torch.bfloat16) else numbers.float()
    count = numbers.numel() // pieces
    rows = numbers.new_empty((pieces, codec.message_bytes(count)), dtype=torch.uint8)
    if memory is not None:
        memory.encode(codec, exact, pieces, name, rows)
        return rows
    for row, chunk in zip(rows, exact.view(pieces, count), strict=True):
        codec.encode(chunk, row)
    return rows


BACKENDS = ("nccl", "gloo")
WAYS = ("auto", "flat", "hierarchical", "leader")
CODECS = ("none", "half", "bf16", "int8", "int4")
SIZES = 48  # powers of two of a tensor's numbers for which the plan has a route
SHOWN = (256, 2**18, 6_553_600)  # numbers of the tensors in ``explanation``: 1 KB, 1 MB, 25 MB
NO_LINK = Link(0.0, float("inf"))  # link of a topology with a single rank or host


@dataclass(frozen=True)
class CollectiveSettings:
    """Settings of a collective; equal on all ranks."""

    backend: str
    topology: str | Topology
    way: str
    within: str
    between: str
    timeout: float

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("way", self.way, WAYS)
        _one_of("within", self.within, CODECS)
        _one_of("between", self.between, CODECS)
        if isinstance(self.topology, str):
            check_name(self.topology)
        require_real(timeout=self.timeout)
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be more than 0 seconds")
        if self.uses_codec and self.way not in ("auto", "hierarchical"):
            raise ValueError(
                f"way={self.way!r} uses no codec: leave within and between at 'none', or set "
                "way='hierarchical'"
            )

    @property
    def uses_codec(self) -> bool:
        return self.within != "none" or self.between != "none"


@dataclass(frozen=True)
class Route:
    """One algorithm of an all-reduce, and its codecs."""

    way: str = "flat"
    within: str = "none"
    between: str = "none"

    def __str__(self) -> str:
        names = (("within", self.within), ("between", self.between))
        codec_texts = [f"{codec} {where} hosts" for where, codec in names if codec != "none"]
        return ", ".join([self.way, *codec_texts])


@dataclass(frozen=True)
class CollectivePlan:
    """Hosts and links, and the algorithm for tensors of up to 1, 2, 4, ... numbers."""

    topology: Topology
    by_size: tuple[str, ...]

    def way(self, numbers: int) -> str:
        return self.by_size[min(max(numbers - 1, 0).bit_length(), SIZES - 1)]


def alone() -> CollectivePlan:
    """Returns the plan of a single rank."""
    return CollectivePlan(Topology(((0,),), NO_LINK, NO_LINK, "one rank"), ("flat",) * SIZES)


def agreed(settings: CollectiveSettings, host: str) -> CollectivePlan:
    """Returns rank 0's plan; every rank calls it.

    Raises:
        ValueError: on all ranks, if they were given different settings, or a way that these hosts
            don't allow.
    """
    reports: list[tuple[str, CollectiveSettings]] = groups.gathered_objects((host, settings))
    first = vars(reports[0][1])
    for rank, (_, theirs) in enumerate(reports):
        for name, value in vars(theirs).items():
            if value != first[name]:
                raise ValueError(
                    f"ranks disagree: rank {rank} has {name}={value!r}, rank 0 "
                    f"{name}={first[name]!r}; give all ranks the same settings"
                )
    hosts = hosts_of([name for name, _ in reports])
    topology_hosts = settings.topology.hosts if isinstance(settings.topology, Topology) else hosts
    check_way("hierarchical" if settings.uses_codec else settings.way, topology_hosts)
    topology = _topology(settings.topology, hosts)
    plan = [_plan_for(settings, topology) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plan, 0)
    assert plan[0] is not None  # rank 0 made it
    return plan[0]


def check_way(way: str, hosts: Sequence[Sequence[int]]) -> None:
    """Checks that these hosts allow an algorithm.

    Raises:
        ValueError: hierarchical, and hosts have different numbers of ranks.
    """
    sizes = [len(ranks) for ranks in hosts]
    if way == "hierarchical" and len(set(sizes)) > 1:
        raise ValueError(
            f"hosts have {', '.join(map(str, sizes))} ranks: hierarchical and codecs need the same "
            "number on each; start as many on every host, or let tensors travel flat"
        )


def explanation(plan: CollectivePlan, settings: CollectiveSettings) -> str:
    """Describes the topology, the cost of each algorithm, and the choice."""
    topology, on_nccl = plan.topology, settings.backend == "nccl" and has_cuda()
    lines = [str(topology), f"buckets: at least {bucket_bytes(topology) / 2**20:.0f} MB"]
    for numbers in SHOWN:
        chosen = plan.way(numbers)
        lines.append(f"{4 * numbers / 1e6:.3g} MB of float32: {chosen}")
        lines += [f"    {cost}" for cost in route_costs(topology, numbers, on_nccl)]
    if settings.uses_codec:
        lines.append("chosen: hierarchical, because a codec was asked for")
    elif settings.way != "auto":
        lines.append(f"chosen: {settings.way}, because it was asked for")
    elif on_nccl:
        lines.append("chosen: flat; NCCL finds rings, trees and rank order itself")
    else:
        lines.append("chosen: the cheapest by latency and bandwidth")
    return "\n".join(lines)


def codecs_for(tensor: Tensor, route: Route) -> tuple[Codec | None, Codec | None]:
    """Returns codecs within and between hosts; whole numbers and float64 are sent unchanged."""
    if tensor.dtype not in (torch.float32, *HALVES):
        return None, None
    within, between = route.within, route.between
    return (
        None if within == "none" else codec_called(within),
        None if between == "none" else codec_called(between),
    )


def rail_order(topology: Topology) -> tuple[int, ...]:
    """Returns the ranks in the order of pieces after a scatter within hosts and one across."""
    return tuple(rank for rail in zip(*topology.hosts, strict=True) for rank in rail)


def _topology(topology: str | Topology, hosts: tuple[tuple[int, ...], ...]) -> Topology:
    if isinstance(topology, Topology):
        if topology.ranks != sum(map(len, hosts)):
            raise ValueError(
                f"the topology has {topology.ranks} ranks and {sum(map(len, hosts))} are running"
            )
        return topology
    if topology == "detect":
        return with_detected_links(hosts, gpu_link() if moves_by_nccl() else None)
    if topology != "measure":
        return with_named_links(topology, hosts)
    device = str(own_accelerator()) if moves_by_nccl() else "cpu"
    within, between = measure(hosts, device)
    return Topology(hosts, within or NO_LINK, between or NO_LINK, "measured")


def _plan_for(settings: CollectiveSettings, topology: Topology) -> CollectivePlan:
    if settings.uses_codec:
        return CollectivePlan(topology, ("hierarchical",) * SIZES)
    if settings.way != "auto":
        return CollectivePlan(topology, (settings.way,) * SIZES)
    on_nccl = moves_by_nccl()
    cheapest = (route_costs(topology, 2**k, on_nccl)[0].way for k in range(SIZES))
    return CollectivePlan(topology, tuple(cheapest))


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ValueError(f"{name} is {value!r}{hint}; it must be one of {', '.join(choices)}")
