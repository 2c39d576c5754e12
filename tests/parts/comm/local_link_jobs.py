"""What ranks in a lab do for the tests of training apart: each prints one line of JSON."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.local_sgd import DriftError, LocalSteps
from hasten.parts.comm.streaming_local_sgd import Stream

NUMBERS = 1_000_000


def steps(count: int, pause: float, seconds: float) -> None:
    """Steps of a stream with a pause in each; a file says how far they are."""
    weights = [torch.zeros(40_000)]
    limit = datetime.timedelta(seconds=seconds)
    stream = Stream(weights, codec("int4"), 2, timeout=limit)
    found = {"error": "", "sum": 0.0}
    try:
        for step in range(count):
            weights[0] += int(os.environ["RANK"]) + 1
            stream.after_step()
            time.sleep(pause)
            Path(os.environ["HASTEN_RENDEZVOUS"] + f".step-{step}").touch()
        stream.synchronize()
        found["sum"] = float(weights[0].double().sum())
    except DriftError as error:
        found["error"] = str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group that has lost a rank has no orderly end


def sent(name: str, rounds: int) -> None:
    """Bytes that a number of exchanges should send, and those that the interface has sent."""
    weights = [torch.randn(NUMBERS)]
    part: Stream | LocalSteps
    if name == "stream":
        part = Stream(weights, codec("int4"), 2)
    else:
        part = LocalSteps(weights, 1, codec=codec(name))
    dist.barrier()
    before = _sent()
    for _ in range(rounds):
        weights[0].add_(torch.randn(NUMBERS))
        part.after_step()
    dist.barrier()
    counted = _sent_in_all() - before
    print(json.dumps({"predicted": part.predicted_bytes * rounds, "counted": counted}))
    dist.barrier()
    dist.destroy_process_group()


def _sent() -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(x.split(":")[1].split()[8]) for x in lines if x.strip().startswith("eth0:"))


def _sent_in_all() -> int:
    """Bytes sent once nothing is under way: a late message may leave after the barrier's own."""
    before, end = -1, time.monotonic() + 10
    while (now := _sent()) != before and time.monotonic() < end:
        before = now
        time.sleep(0.2)
    return now


if __name__ == "__main__":
    torch.set_num_threads(1)
    codec("int4").encode(torch.ones(256))  # compiled before anybody waits for anybody
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HASTEN_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    job, *given = sys.argv[1:]
    if job == "steps":
        steps(int(given[0]), float(given[1]), float(given[2]))
    else:
        sent(given[0], int(given[1]))
