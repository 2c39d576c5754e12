"""What ranks do for the tests of topology-aware collectives; hosts are faked by a name per rank."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.environment import World
from hasten.parts.comm.codecs import codec
from hasten.parts.comm.collective_plan import Route
from hasten.parts.comm.collectives import CollectiveError, RoutedBuckets, TopoAwareCollective
from hasten.parts.comm.methods import ErrorMemory
from hasten.parts.comm.topology import Link, Topology
from told import refusal

LIMIT = 2  # seconds until a rank that doesn't answer counts as gone
SLOW = Topology(((0, 1), (2, 3)), Link(1e-5, 5e9), Link(1e-4, 1e7), "given")


def values(rank: int, count: int, dtype: Any = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=draw, dtype=torch.float64).to(dtype)


def _host(rank: int) -> str:
    return f"host-{rank % 2}"  # neighbours on different hosts: the worst order for a ring


def everything(world: World) -> dict[str, Any]:
    """All jobs for four ranks: a start takes longer than what they do."""
    jobs = (every_way, other_formats, large, pieces, by_codec, measured, given, begun)
    return {job.__name__: job(world) for job in jobs}


def begun(world: World) -> dict[str, Any]:
    """All-reduces that are begun and waited for, dropped, or followed by one that waits."""
    collective = TopoAwareCollective("gloo", "ethernet", way="flat", host=_host(world.rank))
    mine = [values(world.rank, 300 + n) for n in range(3)]
    works = [collective.all_reduce(tensor, "mean", async_op=True) for tensor in mine]
    works[2].wait()
    dropped = values(world.rank, 50)
    collective.all_reduce(dropped, async_op=True)
    before = values(world.rank, 60)
    work = collective.all_reduce(before, "max", async_op=True)
    collective.all_reduce(torch.ones(3))
    return {
        "done": all(w.is_completed() for w in [*works, work]),
        "bits": [_bits(t) for t in [*mine, dropped, before]],
        "errors": [
            float(
                (t.double() - sum(values(r, len(t), torch.float64) for r in range(4)) / n)
                .abs()
                .max()
            )
            for t, n in zip([*mine, dropped], (4, 4, 4, 1), strict=True)
        ],
        "max": bool((before == torch.stack([values(r, 60) for r in range(4)]).amax(0)).all()),
    }


def every_way(world: World) -> dict[str, Any]:
    """Each way and size: the largest error to a float64 sum, and a checksum of the bits."""
    found: dict[str, Any] = {}
    for way in ("flat", "hierarchical", "leader", "auto"):
        collective = TopoAwareCollective(
            "gloo", "ethernet", way=way, host=_host(world.rank), timeout=60
        )
        for count in (1, 3, 257, 5000):
            for op in ("sum", "mean"):
                mine = values(world.rank, count)
                result = collective.all_reduce(mine, op)
                exact = sum(values(r, count, torch.float64) for r in range(world.size))
                exact = exact / world.size if op == "mean" else exact
                error = float((result.double() - exact).abs().max())
                found[f"{way} {count} {op}"] = [error, _bits(result), result is mine]
        found[f"{way} order"] = list(collective.topology.order)
    return found


def other_formats(world: World) -> dict[str, Any]:
    collective = TopoAwareCollective(
        "gloo", "ethernet", way="hierarchical", host=_host(world.rank), timeout=60
    )
    whole = collective.all_reduce(torch.arange(7) + world.rank)
    wide = collective.all_reduce(values(world.rank, 50, torch.float64))
    half = collective.all_reduce(values(world.rank, 50, torch.bfloat16), "mean")
    matrix = values(world.rank, 60).view(6, 10)
    collective.all_reduce(matrix.t(), "mean")  # a view that isn't contiguous, changed in place
    most = collective.all_reduce(torch.tensor([float(world.rank), -float(world.rank)]), "max")
    exact = [values(r, 50, torch.float64) for r in range(world.size)]
    flat = [values(r, 60, torch.float64).view(6, 10) for r in range(world.size)]
    return {
        "whole": whole.tolist(),
        "wide": float((wide - sum(exact)).abs().max()),
        "half": float((half.double() - sum(exact) / world.size).abs().max()),
        "half type": str(half.dtype),
        "matrix": float((matrix.double() - sum(flat) / world.size).abs().max()),
        "most": most.tolist(),
        "empty": collective.all_reduce(torch.empty(0)).numel(),
    }


def large(world: World) -> dict[str, Any]:
    """By each way the least and largest of fp16 means whose sums fp16 can't hold."""
    found = {}
    for way in ("flat", "hierarchical", "leader"):
        collective = TopoAwareCollective(
            "gloo", "ethernet", way=way, host=_host(world.rank), timeout=60
        )
        mine = torch.full((6, 4), 40_000.0, dtype=torch.float16)
        piece = collective.reduce_scatter(mine, "mean")
        whole = collective.all_reduce(mine.t(), "mean")
        found[way] = [float(value) for t in (piece, whole) for value in (t.min(), t.max())]
    return found


def pieces(world: World) -> dict[str, Any]:
    """reduce_scatter and all_gather give by rank what torch's own give."""
    collective = TopoAwareCollective("gloo", "ethernet", host=_host(world.rank), timeout=60)
    mine = values(world.rank, 8 * world.size)
    piece = collective.reduce_scatter(mine)
    exact = sum(values(r, 8 * world.size, torch.float64) for r in range(world.size))
    wanted = exact.view(world.size, -1)[world.rank]
    gathered = collective.all_gather(values(world.rank, 5))
    ours = torch.cat([values(r, 5) for r in range(world.size)])
    return {
        "piece": float((piece.double() - wanted).abs().max()),
        "mean": float((collective.reduce_scatter(mine, "mean") - piece / world.size).abs().max()),
        "gathered": bool(torch.equal(gathered, ours)),
        "refused": refusal(lambda: collective.reduce_scatter(torch.ones(world.size + 1))),
    }


def by_codec(world: World) -> dict[str, Any]:
    """Relative error and bits by codec; with a memory the mean of many calls comes near."""
    found: dict[str, Any] = {}
    for name in ("half", "bf16", "int8", "int4"):
        collective = TopoAwareCollective(
            "gloo", "ethernet", between=name, host=_host(world.rank), timeout=60
        )
        exact = sum(values(r, 3000, torch.float64) for r in range(world.size)) / world.size
        result = collective.all_reduce(values(world.rank, 3000), "mean")
        error = float((result.double() - exact).norm() / exact.norm())
        memory, total = ErrorMemory(), torch.zeros(3000, dtype=torch.float64)
        for _ in range(20):
            total += collective.all_reduce(
                values(world.rank, 3000), "mean", memory=memory, name="g"
            ).double()
            memory.commit(True)
        late = float((total / 20 - exact).norm() / exact.norm())
        poisoned = values(world.rank, 3000)
        poisoned[7] = torch.nan if world.rank == 1 else 0.0
        spoilt = collective.all_reduce(poisoned, "mean", memory=memory, name="g")
        memory.commit(False)
        healthy = collective.all_reduce(values(world.rank, 3000), "mean", memory=memory, name="g")
        found[name] = {
            "error": error,
            "late": late,
            "bits": _bits(result),
            "spoilt": bool(torch.isfinite(spoilt).all()),
            "healthy": bool(torch.isfinite(healthy).all()),
        }
    return found


def unequal(world: World) -> dict[str, Any]:
    """Two ranks on one host and one on the other: what is possible works, the rest is refused."""
    host = "one" if world.rank < 2 else "other"
    collective = TopoAwareCollective("gloo", "ethernet", host=host, timeout=60)
    result = collective.all_reduce(torch.full((10,), float(world.rank)))
    piece = collective.reduce_scatter(torch.arange(6.0))
    gathered = collective.all_gather(torch.tensor([float(world.rank)]))
    uneven = Topology(((0, 1), (2,)), Link(1e-5, 5e9), Link(1e-4, 1e7), "given")
    coded = TopoAwareCollective("gloo", "ethernet", between="int8", host=host, timeout=60)
    other = TopoAwareCollective("gloo", uneven, way="hierarchical", timeout=60)
    route = Route("hierarchical")
    refused = [
        refusal(lambda: coded.all_reduce(torch.ones(4))),
        refusal(lambda: collective.all_reduce(torch.ones(4), route=route)),
        refusal(lambda: other.all_reduce(torch.ones(4))),
    ]
    return {
        "sum": result.tolist(),
        "piece": piece.tolist(),
        "gathered": gathered.tolist(),
        "refused": refused,
    }


def disagreeing(world: World) -> str:
    topology = "pcie" if world.rank == 1 else "ethernet"
    collective = TopoAwareCollective("gloo", topology, timeout=60)
    return refusal(lambda: collective.all_reduce(torch.ones(4)))


def measured(world: World) -> dict[str, Any]:
    collective = TopoAwareCollective("gloo", "measure", host=_host(world.rank), timeout=60)
    topology = collective.topology
    return {
        "within": [topology.within.latency, topology.within.bandwidth],
        "between": [topology.between.latency, topology.between.bandwidth],
        "explained": collective.explain(),
        "sum": collective.all_reduce(torch.ones(3)).tolist(),
    }


def given(world: World) -> dict[str, Any]:
    """Rank 0's plan counts: ways by size are those of its topology."""
    collective = TopoAwareCollective("gloo", SLOW, timeout=60)
    collective.prepare()
    return {
        "ways": [collective._prepared().way(n) for n in (1, 10**6)],
        "crossings": [SLOW.crossings((0, 1, 2, 3)), SLOW.crossings((0, 2, 1, 3))],
    }


def a_rank_that_leaves(place: str, how: str) -> None:
    """The last rank ends between two steps; the others say whom they miss. Run as a program."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    codec("int8").encode(torch.ones(256))  # compiled before anybody waits for anybody
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    collective = TopoAwareCollective("gloo", "ethernet", host=f"host-{rank}", timeout=LIMIT)
    ddp = DistributedDataParallel(nn.Linear(10, 10))
    if how == "buckets":
        RoutedBuckets(collective, Route("hierarchical", between="int8")).attach(ddp)
    for step in range(6):
        if step == 4 and rank == size - 1:
            os._exit(0)
        try:
            if how == "buckets":
                ddp(torch.ones(2, 10)).sum().backward()
            else:
                collective.all_reduce(torch.ones(10))
        except CollectiveError as error:
            print(error.missing, error, flush=True)
            break
        except RuntimeError as error:  # DDP makes one of what a bucket's future holds
            print("(2,)", error, flush=True)
            break
    os._exit(3)


def _bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.int32).tolist()[:300]


if __name__ == "__main__":
    a_rank_that_leaves(sys.argv[1], sys.argv[2])
