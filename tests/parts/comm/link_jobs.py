"""What ranks in a lab do for the tests of links: each prints one line of JSON.

Called with the name of a job and its numbers.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.gradient_compressor import GradientCompressor
from netlab.counting import counting

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MEETING = os.environ["HASTEN_RENDEZVOUS"]
STEPS = 4
NUMBERS = 500_000
ROUNDS = 3  # of which the one with the fewest bytes counts: a busy machine sends some twice


def interface() -> int:
    """Bytes that this host's interface has sent; 0 where it has none of its own."""
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    found = [x.split(":")[1].split() for x in lines if x.strip().startswith(f"{nic}:")]
    return int(found[0][8]) if found else 0


def layers(wide: int, deep: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(wide, wide) for _ in range(deep)))


def compressor(method: str, **settings: Any) -> GradientCompressor:
    return GradientCompressor(sparsity_method=method, communication_backend="gloo", **settings)


def compressed_loop(*methods: str) -> dict[str, Any]:
    """Bytes that steps of a plain loop should send, and those that the interface has sent.

    Where there is no interface the lab is told.
    """
    found = {}
    for method in methods:
        plain, c = layers(512, 4), compressor(method, rank=64)
        plain(torch.ones(2, 512)).sum().backward()
        c.synchronize_gradients(plain)
        dist.barrier()
        before = interface()
        with counting():
            for _ in range(STEPS):
                c.synchronize_gradients(plain)
        dist.barrier()
        found[method] = {
            "predicted": c.predicted(plain) * STEPS,
            "interface": interface() - before,
        }
    return found


def reduced(times: str, *cases: str) -> dict[str, Any]:
    """Of each case ``codec:way``, or of torch's own: the interface's bytes of an all-reduce, and a
    sum of the bits."""
    found = {}
    for case in cases:
        if case == "torch":
            found[case] = _case(lambda x: dist.all_reduce(x) or x, int(times))
            continue
        between, way = case.split(":")
        collective = TopoAwareCollective(
            "gloo", "ethernet", way=way, between=between, host=HOST, timeout=60
        )
        collective.prepare()
        found[case] = _case(collective.all_reduce, int(times))
        found[case]["payload"] = collective.bytes_sent / (ROUNDS * int(times) + 1)
    return found


def _case(all_reduce: Callable[[Tensor], Tensor], times: int) -> dict[str, float]:
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(PLACE))
    all_reduce(x.clone())  # connections are made
    return min((_round(all_reduce, x, times) for _ in range(ROUNDS)), key=lambda f: f["bytes"])


def _round(all_reduce: Callable[[Tensor], Tensor], x: Tensor, times: int) -> dict[str, float]:
    dist.barrier()
    before = interface()
    dist.barrier()
    for _ in range(times):
        y = x.clone()
        all_reduce(y)
    dist.barrier()
    after = interface()
    dist.barrier()
    return {
        "bytes": (after - before) / times,
        "sum": y.view(torch.int32).sum().item(),
    }


Step = Callable[[int], object]


def compressed_steps(seconds: float) -> Step:
    ddp = DistributedDataParallel(layers(64, 2))
    c = compressor("int8", minimum=0, timeout_seconds=seconds)
    c.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step(_: int) -> None:
        ddp(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(count: str, pause: str, seconds: str) -> dict[str, Any]:
    """A file says how far a rank is; an error is told with the seconds since its step began."""
    codec("int8").encode(torch.ones(256))  # compiled before anybody waits for anybody
    step = compressed_steps(float(seconds))
    began = time.monotonic()
    try:
        for number in range(int(count)):
            began = time.monotonic()
            step(number)
            time.sleep(float(pause))
            Path(f"{MEETING}.step-{number}").touch()
        return {"error": ""}
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job for job in (compressed_loop, reduced, steps)
}


def main(name: str, given: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{MEETING}",
        rank=PLACE if name == "reduced" else RANK,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )
    answer = JOBS[name](*given)
    print(json.dumps(answer), flush=True)
    if not answer.get("error"):
        dist.barrier()
    os._exit(0)  # a group that has lost a rank has no orderly end


if __name__ == "__main__":
    RANKS_PER_HOST = int(os.environ["HASTEN_NETLAB_RANKS_PER_HOST"])
    HOST = f"host-{RANK // RANKS_PER_HOST}"
    # Dealt over hosts, the worst order for a ring: it leaves a host at every step.
    PLACE = (RANK % RANKS_PER_HOST) * (WORLD // RANKS_PER_HOST) + RANK // RANKS_PER_HOST
    main(sys.argv[1], sys.argv[2:])
