"""How much of a link an exchange uses: the whole message at once, and in pieces.

    python benchmarks/bench_full_duplex.py [--hosts 2,3] [--rates 100mbit,1gbit,none]

Each host of a lab (tools/netlab/README.md) has one rank. All ways take turns, barrier to barrier;
shown is the median time as a share of what the link could do at best if both directions were full.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import gloo_rank
import torch
import torch.distributed as dist
from smoke import arguments

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from hasten.parts.comm import groups
from netlab import Lab

SIZES = (500_000, 2_700_000, 10_000_000)  # bytes of one rank for one other
ANY = 1 << 40
WAYS = {  # bytes of a piece, and how many pieces there are at most
    "whole": (ANY, 1),
    "64 KiB": (1 << 16, ANY),
    "256 KiB": (1 << 18, ANY),
    "1 MiB": (1 << 20, ANY),
    "as it is": (groups.PIECE, groups.MOST),
}
PAYLOAD = 1448 / 1514  # of a packet
RATES = {"100mbit": 1e8, "1gbit": 1e9}


def on_rank(rounds: int) -> None:
    rank, world = gloo_rank.join(), dist.get_world_size()
    found: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for size in SIZES:
            rows = torch.zeros(world, size, dtype=torch.uint8)
            into = torch.empty_like(rows)
            for way, settings in WAYS.items():
                groups.PIECE, groups.MOST = settings
                for kind in ("all_gather", "all_to_all"):
                    dist.barrier()
                    began = time.perf_counter()
                    if kind == "all_gather":
                        groups.all_gather(into, rows[rank]).wait()
                    else:
                        groups.all_to_all(into, rows).wait()
                    dist.barrier()
                    if turn:
                        key = f"{kind}/{size}/{way}"
                        found.setdefault(key, []).append(time.perf_counter() - began)
    if rank == 0:
        gloo_rank.answer(found)
    dist.barrier()


def table(found: dict[str, list[float]], hosts: int, rate: str) -> list[str]:
    lines = [f"\n{hosts} hosts, {rate}\n", f"| | bytes | {' | '.join(WAYS)} |"]
    lines.append("|---" * (2 + len(WAYS)) + "|")
    for kind in ("all_gather", "all_to_all"):
        for size in SIZES:
            row = []
            for way in WAYS:
                seconds = statistics.median(found[f"{kind}/{size}/{way}"])
                bits = 8 * size * (hosts - 1) / seconds
                best = RATES.get(rate)
                share = f" ({bits / best / PAYLOAD:.0%})" if best else ""
                row.append(f"{1e3 * seconds:.0f} ms{share}")
            lines.append(f"| {kind} | {size / 1e6:.1f} M | {' | '.join(row)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", default="2,3")
    parser.add_argument("--rates", default="100mbit,1gbit,none")
    parser.add_argument("--rounds", type=int, default=5)
    given = arguments(parser, hosts="2", rates="1gbit,none", rounds=1, SIZES=(20_000, 300_000))
    if "RANK" in os.environ:
        on_rank(given.rounds)
        return
    for hosts in map(int, given.hosts.split(",")):
        for rate in given.rates.split(","):
            with Lab(hosts, 1, None if rate == "none" else rate) as lab:
                command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
                found = gloo_rank.answer_of(lab, command, 1200)
            print("\n".join(table(found, hosts, rate)), flush=True)


if __name__ == "__main__":
    main()
