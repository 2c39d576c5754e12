"""What a reduce-scatter of shards takes with a codec in it, beside the full one.

    python benchmarks/bench_sharded.py [--millions 4] [--rounds 5] [--megabits 0]

Two ranks on this machine hold halves of one matrix and exchange its gradient by each method in
turns, in the same processes. A link is told by --megabits: then the bytes' time on it is added to
the seconds measured (each rank sends and receives at once), as nothing overlaps on a processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from smoke import arguments

METHODS = ("none", "bf16", "int8", "int4", "topk")
RANK = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from hasten.parts.comm.methods import CompressionSettings
from hasten.parts.distributed.compressed_shards import ShardedGradients
from hasten.parts.distributed.fsdp import shard
torch.set_num_threads(1)
rank, rows, rounds, meeting, *methods = sys.argv[1:]
dist.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(int(rows), 1000))
    def forward(self, gift):
        return (self.matrix * gift).sum()
gift = torch.randn(int(rows), 1000)
held = {}
for method in methods:
    held[method] = module, exchange = Given(), None
    shard(module, mesh)
    if method != "none":
        exchange = ShardedGradients(CompressionSettings(method=method, minimum=0))
        exchange.attach(module)
        held[method] = module, exchange
for turn in range(int(rounds) + 1):
    for method, (module, exchange) in held.items():
        if exchange is not None:
            exchange.passes(True)
        loss = module(gift)
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - began
        if exchange is not None:
            exchange.confirm()
        module.zero_grad(set_to_none=True)
        sent = 2 * 1000 * int(rows) if exchange is None else exchange.predicted()
        if turn:
            print(method, seconds, sent)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=4, help="weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabits", type=float, default=0, help="of the link; 0: as it is")
    options = arguments(parser, millions=0.01, rounds=1)
    found = measured(round(1000 * options.millions), options.rounds)
    plain = [seconds for seconds, _ in found["none"]]
    print(f"{options.millions:g} M weights, 2 ranks, {options.rounds} rounds; ratio to none")
    print(f"{'method':<7} {'MB sent':>8} {'seconds':>8} {'ratio':>6}")
    for method, rows in found.items():
        link = 8 * rows[0][1] / (options.megabits * 1e6) if options.megabits else 0.0
        full = 8 * found["none"][0][1] / (options.megabits * 1e6) if options.megabits else 0.0
        seconds = statistics.median(taken for taken, _ in rows) + link
        pairs = zip(rows, plain, strict=True)
        ratio = statistics.median((a[0] + link) / (b + full) for a, b in pairs)
        print(f"{method:<7} {rows[0][1] / 1e6:8.2f} {seconds:8.3f} {ratio:6.2f}")


def measured(rows: int, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Of each method the seconds of the slower rank and its bytes, by round."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(rows), str(rounds), str(Path(folder) / "meeting"), *METHODS]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), *given],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]
        said = [p.communicate()[0].splitlines() for p in processes]
    found: dict[str, list[tuple[float, int]]] = {method: [] for method in METHODS}
    for one, two in zip(*said, strict=True):
        method, seconds, sent = one.split()
        found[method].append((max(float(seconds), float(two.split()[1])), int(sent)))
    return found


if __name__ == "__main__":
    main()
