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
from hasten.parts.comm.local_sgd import LocalSteps
from hasten.parts.comm.streaming_local_sgd import Stream
from netlab.counting import counting

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MEETING = os.environ["HASTEN_RENDEZVOUS"]
STEPS = 4
WEIGHTS = 1_000_000
NUMBERS = 500_000
ROUNDS = 3  # of which the one with the fewest bytes counts: a busy machine sends some twice


def interface() -> tuple[int, int]:
    """Bytes and packets that this host's interface has sent; 0 where it has none of its own."""
    nic = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    found = [x.split(":")[1].split() for x in lines if x.strip().startswith(f"{nic}:")]
    return (int(found[0][8]), int(found[0][9])) if found else (0, 0)


def layers(wide: int, deep: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(wide, wide) for _ in range(deep)))


def compressor(method: str, **settings: Any) -> GradientCompressor:
    return GradientCompressor(sparsity_method=method, communication_backend="gloo", **settings)


def compressed_ddp(*methods: str) -> dict[str, Any]:
    """Bytes that steps past the dense start should send, and those that the interface has sent."""
    found = {}
    for method in methods:
        plain = layers(512, 4)
        ddp = DistributedDataParallel(plain, bucket_cap_mb=2)
        # Small messages pay more for packets: 7 % with factors of 16 columns, 50 kB a message.
        c = compressor(method, rank=64)
        c.attach(ddp)
        predicted = c.predicted(plain, bucket_cap_mb=2)
        for _ in range(2):
            ddp(torch.ones(2, 512)).sum().backward()
        dist.barrier()
        before, counted = interface()[0], c.sent_bytes
        for _ in range(STEPS):
            ddp(torch.ones(2, 512)).sum().backward()
        dist.barrier()
        found[method] = {
            "predicted": predicted * STEPS,
            "collectives": c.sent_bytes - counted,
            "interface": interface()[0] - before,
        }
    return found


def compressed_loop(*methods: str) -> dict[str, Any]:
    """The same of a plain loop, all methods; where there is no interface the lab is told."""
    found = {}
    for method in methods:
        plain, c = layers(512, 4), compressor(method, rank=64)
        plain(torch.ones(2, 512)).sum().backward()
        c.synchronize_gradients(plain)
        dist.barrier()
        before = interface()[0]
        with counting():
            for _ in range(STEPS):
                c.synchronize_gradients(plain)
        dist.barrier()
        found[method] = {
            "predicted": c.predicted(plain) * STEPS,
            "interface": interface()[0] - before,
        }
    return found


def local_training(rounds: str, *names: str) -> dict[str, Any]:
    """Bytes that a number of exchanges should send, and those that the interface has sent."""
    return {name: _local_training(name, int(rounds)) for name in names}


def _local_training(name: str, rounds: int) -> dict[str, Any]:
    weights = [torch.randn(WEIGHTS)]
    part: Stream | LocalSteps
    if name == "stream":
        part = Stream(weights, codec("int4"), 2)
    else:
        part = LocalSteps(weights, 1, codec=codec(name))
    dist.barrier()
    before = interface()[0]
    for _ in range(rounds):
        weights[0].add_(torch.randn(WEIGHTS))
        part.after_step()
    dist.barrier()
    # A late message may leave after the barrier's own: until nothing is under way.
    last, end = -1, time.monotonic() + 10
    while (now := interface()[0]) != last and time.monotonic() < end:
        last = now
        time.sleep(0.2)
    return {"predicted": part.predicted_bytes * rounds, "counted": now - before}


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
    before, packets = interface()
    dist.barrier()
    for _ in range(times):
        y = x.clone()
        all_reduce(y)
    dist.barrier()
    after, packets_after = interface()
    dist.barrier()
    return {
        "bytes": (after - before) / times,
        "packets": (packets_after - packets) / times,
        "sum": y.view(torch.int32).sum().item(),
    }


Steps = tuple[Callable[[int], object], Callable[[], float]]  # one step, and the sum afterwards


def _ddp_steps(seconds: float) -> Steps:
    ddp = DistributedDataParallel(layers(64, 2))
    c = compressor("int8", minimum=0, timeout_seconds=seconds)
    c.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step(_: int) -> None:
        ddp(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def total() -> float:
        c.check(ddp.parameters())
        return float(sum(p.detach().double().sum() for p in ddp.parameters()))

    return step, total


def _stream_steps(seconds: float) -> Steps:
    weight = torch.zeros(40_000)
    limit = datetime.timedelta(seconds=seconds)
    stream = Stream([weight], codec("int4"), 2, timeout=limit)

    def step(_: int) -> None:
        weight.add_(RANK + 1)
        stream.after_step()

    def total() -> float:
        stream.synchronize()
        return float(weight.double().sum())

    return step, total


def _reduced_steps(seconds: float) -> Steps:
    collective = TopoAwareCollective(
        "gloo", "ethernet", way="hierarchical", between="int8", host=HOST, timeout=seconds
    )
    sums: list[float] = []

    def step(number: int) -> None:
        values = torch.arange(5000.0) * (RANK + 1) + number
        collective.all_reduce(values)
        sums.append(float(values.double().sum()))

    return step, lambda: sum(sums)


STEPPING = {"compressed": _ddp_steps, "stream": _stream_steps, "reduced": _reduced_steps}


def steps(kind: str, count: str, pause: str, seconds: str) -> dict[str, Any]:
    """A file says how far a rank is; an error is told with the seconds since its step began."""
    for name in ("int8", "int4"):  # compiled before anybody waits for anybody
        codec(name).encode(torch.ones(256))
    step, total = STEPPING[kind](float(seconds))
    began = time.monotonic()
    try:
        for number in range(int(count)):
            began = time.monotonic()
            step(number)
            time.sleep(float(pause))
            Path(f"{MEETING}.step-{number}").touch()
        return {"error": "", "sum": total()}
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job for job in (compressed_ddp, compressed_loop, local_training, reduced, steps)
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
