"""How ranks of one machine best come by the same weights: each reads, or one reads and sends.

    python benchmarks/bench_starting.py [--megabytes 256] [--rounds 3]

Each way runs in two processes per round, in turns, from a file that the operating system has
forgotten (posix_fadvise). Bytes from the disk are the kernel's count of both processes together
(/proc/PID/io).
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from smoke import arguments

READ = """
import sys, time
from safetensors import safe_open
import torch, torch.distributed as dist
torch.set_num_threads(1)
way, rank, file, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
before = int(open("/proc/self/io").read().split("read_bytes:")[1].split()[0])
dist.barrier()
began = time.perf_counter()
if way == "each reads" or rank == 0:
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_tensor(name).clone() for name in opened.keys()}
if way == "one sends":
    count = torch.tensor([len(found) if rank == 0 else 0]); dist.broadcast(count, 0)
    for index in range(count.item()):
        value = found[f"w{index}"] if rank == 0 else torch.empty(1024, 4096)
        dist.broadcast(value, 0)
dist.barrier()
seconds = time.perf_counter() - began
after = int(open("/proc/self/io").read().split("read_bytes:")[1].split()[0])
print(seconds, after - before)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = arguments(parser, megabytes=16, rounds=1)
    import torch
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder) / "weights.safetensors"
        count = max(options.megabytes // 16, 1)
        save_file({f"w{i}": torch.randn(1024, 4096) for i in range(count)}, file)
        found: dict[str, list[tuple[float, float]]] = {"each reads": [], "one sends": []}
        for _ in range(options.rounds):
            for way, results in found.items():
                results.append(both(way, file))
        print(f"{'way':<12} {'seconds':>8} {'MB from disk':>13}  of {16 * count} MiB")
        for way, results in found.items():
            seconds, read = (statistics.median(column) for column in zip(*results, strict=True))
            print(f"{way:<12} {seconds:8.2f} {read / 1e6:13.0f}")
        pairs = zip(found["one sends"], found["each reads"], strict=True)
        ratios = [sends[0] / reads[0] for sends, reads in pairs]
        print(f"one sends / each reads, by round: {', '.join(f'{r:.2f}' for r in ratios)}")


def both(way: str, file: Path) -> tuple[float, float]:
    """Seconds of the slower process, and bytes that both had from the disk."""
    forget(file)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ, way, str(rank), str(file), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    said = [[float(v) for v in p.communicate()[0].split()] for p in processes]
    return max(s for s, _ in said), sum(b for _, b in said)


def forget(file: Path) -> None:
    """Let the next reader go to the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
