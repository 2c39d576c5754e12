"""What a rank's memory and the start cost where one rank of a host builds a model for all.

    python benchmarks/bench_arrival.py [--layers 8] [--width 512] [--ranks 2] [--rounds 3]

Both ways run in processes of their own, in turns: every rank builds the model and cuts it (each),
or one does and sends the others what they keep (once). Memory is the kernel's highest mark of a
process (VmHWM) less its mark before the model was built, of the rank that has most and of the one
that has least; seconds are those of the slowest rank from there to pieces.
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

RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig
from hasten.parts.distributed.weight_broadcast import WeightBroadcast
from hasten.parts.distributed.fsdp import shard
torch.set_num_threads(1)
way, rank, world, layers, width, meeting = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
config = LlamaConfig(
    vocab_size=8000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
    num_attention_heads=width // 64, num_key_value_heads=width // 64,
)
def mark(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
))  # imports and caches aren't the model's
Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
before = mark("VmRSS")
dist.barrier()
began = time.perf_counter()
mesh = init_device_mesh("cpu", (world,))
if way == "each" or rank == 0:
    model = AutoModelForCausalLM.from_config(config)
else:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
shard(model, mesh, before=WeightBroadcast(rank == 0) if way == "once" else lambda part: None)
dist.barrier()
seconds = time.perf_counter() - began
count = sum(p.numel() for p in model.parameters())
print(seconds, mark("VmHWM") - before, 4 * count)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = arguments(parser, layers=1, width=64, rounds=1)
    found: dict[str, list[tuple[float, float, float, float]]] = {"each": [], "once": []}
    for _ in range(options.rounds):
        for way, rows in found.items():
            rows.append(all_ranks(way, options.ranks, options.layers, options.width))
    whole = found["each"][0][3]
    print(f"a model of {whole / 1e6:.0f} MB on {options.ranks} ranks")
    print(f"{'way':<6} {'seconds':>8} {'MB, most':>9} {'MB, least':>10}")
    for way, rows in found.items():
        seconds, most, least, _ = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{way:<6} {seconds:8.2f} {most / 1e6:9.0f} {least / 1e6:10.0f}")
    pairs = zip(found["once"], found["each"], strict=True)
    print(f"seconds once / each, by round: {', '.join(f'{a[0] / b[0]:.2f}' for a, b in pairs)}")


def all_ranks(way: str, ranks: int, layers: int, width: int) -> tuple[float, float, float, float]:
    """Seconds of the slowest rank, its memory of the most and of the least, the model's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(ranks), str(layers), str(width), str(Path(folder) / "meeting")]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, way, str(rank), *given],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        said = [[float(v) for v in p.communicate()[0].split()] for p in processes]
    seconds, memory, whole = zip(*said, strict=True)
    return max(seconds), max(memory), min(memory), whole[0]


if __name__ == "__main__":
    main()
