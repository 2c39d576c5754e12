"""What ranks in a lab do for the tests of compressed gradients: each prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.gradient_compressor import GradientCompressor
from netlab.counting import counting

STEPS = 6


def model(wide: int, deep: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(wide, wide) for _ in range(deep)))


def sent(*methods: str) -> None:
    """Bytes that steps past the dense start should send, and those that the interface has sent."""
    found = {}
    for method in methods:
        plain = model(512, 6)
        ddp = DistributedDataParallel(plain, bucket_cap_mb=2)
        # Small messages pay more for packets: 7 % with factors of 16 columns, 50 kB a message.
        compressor = GradientCompressor(
            sparsity_method=method, communication_backend="gloo", rank=64
        )
        compressor.attach(ddp)
        predicted = compressor.predicted(plain, bucket_cap_mb=2)
        for _ in range(2):
            ddp(torch.ones(2, 512)).sum().backward()
        dist.barrier()
        before, counted = _sent(), compressor.sent_bytes
        for _ in range(STEPS):
            ddp(torch.ones(2, 512)).sum().backward()
        dist.barrier()
        found[method] = {
            "predicted": predicted * STEPS,
            "collectives": compressor.sent_bytes - counted,
            "interface": _sent() - before,
        }
    print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def loop(*methods: str) -> None:
    """The same of a plain loop, all methods; where there is no interface the lab is told."""
    found = {}
    for method in methods:
        plain = model(512, 6)
        compressor = GradientCompressor(
            sparsity_method=method, communication_backend="gloo", rank=64
        )
        plain(torch.ones(2, 512)).sum().backward()
        compressor.synchronize_gradients(plain)
        dist.barrier()
        before = _sent()
        with counting():
            for _ in range(STEPS):
                compressor.synchronize_gradients(plain)
        dist.barrier()
        found[method] = {
            "predicted": compressor.predicted(plain) * STEPS,
            "interface": _sent() - before,
        }
    print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def steps(count: int, pause: float, seconds: float) -> None:
    """Steps with a pause in each; a file says how far they are."""
    ddp = DistributedDataParallel(model(64, 2))
    compressor = GradientCompressor(
        sparsity_method="int8", communication_backend="gloo", minimum=0, timeout_seconds=seconds
    )
    compressor.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    found: dict[str, Any] = {"error": "", "sum": 0.0}
    try:
        for step in range(count):
            ddp(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
            Path(os.environ["HASTEN_RENDEZVOUS"] + f".step-{step}").touch()
        compressor.check(ddp.parameters())
        found["sum"] = float(sum(p.detach().double().sum() for p in ddp.parameters()))
    except RuntimeError as error:
        found["error"] = str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group that has lost a rank has no orderly end


def _sent() -> int:
    """Bytes that this host's interface has sent; 0 where it has none of its own."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    found = [x.split(":")[1].split() for x in lines if x.strip().startswith("eth0:")]
    return int(found[0][8]) if found else 0


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    torch.set_num_threads(1)
    for name in ("int8", "int4"):  # compiled before anybody waits for anybody
        codec(name).encode(torch.ones(256))
    meeting = os.environ["HASTEN_RENDEZVOUS"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if what == "sent":
        sent(*given)
    elif what == "loop":
        loop(*given)
    else:
        steps(int(given[0]), float(given[1]), float(given[2]))
