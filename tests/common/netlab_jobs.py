"""What ranks in a lab do for the tests: each prints one line of JSON."""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
PORT = 29600


def transfer(size: int) -> None:
    """Rank 1 sends ``size`` bytes to rank 0 over a plain socket; rank 0 says how long it took."""
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], PORT)) as server:
            peer = server.accept()[0]
            begun, got = time.perf_counter(), 0
            peer.sendall(b"x")  # the clock runs: nothing may come earlier
            while piece := peer.recv(1 << 20):
                got += len(piece)
            print(json.dumps({"bytes": got, "seconds": time.perf_counter() - begun}))
    else:
        peer = _connect()
        peer.recv(1)
        peer.sendall(bytes(size))
        peer.close()


def ping(count: int) -> None:
    """Rank 1 sends one byte and waits for its return, ``count`` times; the quickest and median."""
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], PORT)) as server:
            peer = server.accept()[0]
            while byte := peer.recv(1):
                peer.sendall(byte)
    else:
        peer, taken = _connect(), []
        for _ in range(count):
            begun = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            taken.append(time.perf_counter() - begun)
        print(json.dumps({"quickest": min(taken), "median": sorted(taken)[count // 2]}))


def reduce(numbers: int, times: int, seconds: float) -> None:
    """All ranks add tensors up, and say what came of it; a file says when the first is done.

    ``seconds`` is what an exchange may take; to meet, ranks have two minutes.
    """
    import gc

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HASTEN_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds))
    print(json.dumps({**_reduce(numbers, times), "ddp": _backward()}), flush=True)
    dist.barrier()  # who leaves first would take a message of the others along
    gc.collect()
    dist.destroy_process_group()


def scatter(numbers: int, times: int) -> None:
    """All ranks add tensors up and keep a part each."""
    import gc

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{os.environ['HASTEN_RENDEZVOUS']}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    piece = torch.empty(numbers // ranks)
    for _ in range(times):
        dist.reduce_scatter_tensor(piece, torch.ones(numbers))
    print(json.dumps({"sum": float(piece.sum())}), flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def _reduce(numbers: int, times: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from netlab.counting import counting

    with counting() as counted:
        x = torch.ones(numbers)
        for step in range(times):
            dist.all_reduce(x)
            x /= dist.get_world_size()
            Path(os.environ["HASTEN_RENDEZVOUS"] + f".step-{step}").touch()
        gathered = torch.empty(numbers * dist.get_world_size())
        dist.all_gather_into_tensor(gathered, x)
        dist.all_to_all_single(torch.empty_like(gathered), gathered)
        dist.broadcast(x, 1)
    return {"sum": float(x.sum()), "counted": sum(counted.to.values())}


def _backward() -> float:
    """What one backward pass of DDP sends, issued from C++."""
    import torch
    from torch import nn

    from netlab.counting import CollectiveBytes

    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 10))
    with CollectiveBytes() as counted:
        model(torch.ones(2, 30)).sum().backward()
    return sum(counted.to.values())


def _connect() -> socket.socket:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], PORT), timeout=30)
        except OSError:
            time.sleep(0.05)
            continue
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer
    raise OSError("rank 0 does not listen")


if __name__ == "__main__":
    job, *numbers = sys.argv[1:]
    globals()[job](*(float(n) if "." in n else int(n) for n in numbers))
