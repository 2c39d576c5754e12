"""What ranks in a lab do for the tests of bytes per link: all-reduces, and a look at counters."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.parts.comm.collectives import TopoAwareCollective

NUMBERS = int(os.environ.get("NUMBERS", "500000"))
ROUNDS = 3  # of which the one with the fewest bytes counts: a busy machine sends some twice


def reduce(cases: list[str], times: int) -> None:
    """Of each case ``codec:way``: seconds, the interface's bytes of a call, a sum of the bits.

    Ranks deal themselves over hosts, the worst order for a ring: it leaves a host at every step.
    """
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = int(os.environ["HASTEN_NETLAB_RANKS_PER_HOST"])
    place = (rank % here) * (size // here) + rank // here
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HASTEN_RENDEZVOUS']}",
        rank=place,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    found = {}
    for case in cases:
        between, way = case.split(":")
        collective = TopoAwareCollective(
            "gloo", "ethernet", way=way, between=between, host=f"host-{rank // here}", timeout=60
        )
        collective.prepare()
        found[case] = _case(collective.all_reduce, place, times)
        found[case]["payload"] = collective.bytes_sent / (ROUNDS * times + 1)
    found["torch"] = _case(lambda x: dist.all_reduce(x) or x, place, times)
    print(json.dumps(found))
    dist.destroy_process_group()


def _case(all_reduce: Callable[[Tensor], Tensor], place: int, times: int) -> dict[str, float]:
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(place))
    all_reduce(x.clone())  # connections are made
    rounds = [_round(all_reduce, x, times) for _ in range(ROUNDS)]
    return min(rounds, key=lambda found: found["bytes"])


def _round(all_reduce: Callable[[Tensor], Tensor], x: Tensor, times: int) -> dict[str, float]:
    taken = []
    before, packets = _sent()
    for _ in range(times):
        began, y = time.perf_counter(), x.clone()
        all_reduce(y)
        taken.append(time.perf_counter() - began)
    after, packets_after = _sent()
    return {
        "seconds": sorted(taken)[times // 2],
        "bytes": (after - before) / times,
        "packets": (packets_after - packets) / times,
        "sum": y.view(torch.int32).sum().item(),
    }


def _sent() -> tuple[int, int]:
    """Bytes and packets that this host's interface has sent, when all ranks have come so far."""
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    found = [line.split(":")[1].split() for line in lines if line.strip().startswith(f"{nic}:")]
    dist.barrier()
    return (int(found[0][8]), int(found[0][9])) if found else (0, 0)


if __name__ == "__main__":
    reduce(sys.argv[2:], int(sys.argv[1]))
