"""Seconds and bytes of one all-reduce on 2 hosts x 2 ranks, each way, in turns.

    python benchmarks/bench_topology.py --rate 100mbit --megabytes 20 --rounds 3

The hosts are network namespaces with a link of that rate (``python tools/netlab``); ranks are dealt
over hosts, so that torch's own ring leaves a host at every step. Each round takes every way once;
the table has medians, and ratios within rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gloo_rank
from smoke import arguments

WAYS = {
    "torch, ranks dealt over hosts": None,
    "flat, host by host": ("flat", "none"),
    "leader": ("leader", "none"),
    "hierarchical": ("hierarchical", "none"),
    "hierarchical, bf16 between": ("hierarchical", "bf16"),
    "hierarchical, int8 between": ("hierarchical", "int8"),
    "hierarchical, int4 between": ("hierarchical", "int4"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--as-rank", action="store_true", help="used by the script itself")
    asked = arguments(parser, rate="1gbit", megabytes=0.1, rounds=1)
    if asked.as_rank:
        _rank(int(asked.megabytes * 250_000), asked.rounds)
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
    from netlab import Lab

    with Lab(2, 2, asked.rate, mtu=asked.mtu) as lab:
        command = [sys.executable, "-W", "ignore", __file__, "--as-rank"]
        command += ["--megabytes", str(asked.megabytes), "--rounds", str(asked.rounds)]
        found = gloo_rank.answer_of(lab, command, 550)
    _table(found, asked)


def _table(found: dict[str, Any], asked: argparse.Namespace) -> None:
    size = asked.megabytes * 1e6
    print(f"2 hosts x 2 ranks, {asked.rate}, MTU {asked.mtu}, {asked.megabytes:g} MB of float32")
    print(f"measured links: {found['links']}\n")
    print(f"{'way':<32}{'seconds':>9}{'torch / it':>12}{'bytes of a link / S':>21}{'error':>10}")
    first = next(iter(WAYS))
    for name in WAYS:
        row = found[name]
        ratios = [a / b for a, b in zip(found[first]["seconds"], row["seconds"], strict=True)]
        print(
            f"{name:<32}{statistics.median(row['seconds']):>9.2f}{statistics.median(ratios):>12.2f}"
            f"{statistics.median(row['bytes']) / size:>21.3f}{row['error']:>10.1e}"
        )


def _rank(numbers: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from hasten.parts.comm.collective_plan import Route
    from hasten.parts.comm.collectives import TopoAwareCollective

    rank = int(os.environ["RANK"])
    place = (rank % 2) * 2 + rank // 2
    gloo_rank.join(minutes=2, place=place)
    collective = TopoAwareCollective("gloo", "measure", timeout=120)
    found: dict[str, Any] = {name: {"seconds": [], "bytes": []} for name in WAYS}
    values = [torch.randn(numbers, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    wanted = torch.stack(values).sum(0, dtype=torch.float64)
    for turn in range(rounds + 1):  # the first opens connections
        for name, route in WAYS.items():
            x = values[place].clone()
            before, began = _sent(dist), time.perf_counter()
            if route is None:
                dist.all_reduce(x)
            else:
                collective.all_reduce(x, route=Route(route[0], between=route[1]))
            dist.barrier()
            taken = time.perf_counter() - began
            if turn:
                found[name]["seconds"].append(taken)
                found[name]["bytes"].append(_sent(dist) - before)
            else:
                found[name]["error"] = float((x - wanted).norm() / wanted.norm())
    found["links"] = str(collective.topology)
    gloo_rank.answer(found)
    dist.destroy_process_group()


def _sent(dist: Any) -> int:
    dist.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    return next(int(n.split(":")[1].split()[8]) for n in lines if n.strip().startswith(f"{nic}:"))


if __name__ == "__main__":
    main()
