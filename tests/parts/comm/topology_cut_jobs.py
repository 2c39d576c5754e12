"""Steps of all-reduces by hierarchy while a link is cut; each rank prints one line of JSON."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hasten.parts.comm.codecs import codec
from hasten.parts.comm.collectives import TopoAwareCollective


def steps(count: int, pause: float, seconds: float) -> None:
    """A file says how far a rank is; an error is told with the seconds since its call began."""
    rank = int(os.environ["RANK"])
    here = int(os.environ["HASTEN_NETLAB_RANKS_PER_HOST"])
    torch.set_num_threads(1)
    codec("int8").encode(torch.ones(256))  # compiled before anybody waits for anybody
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['HASTEN_RENDEZVOUS']}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=120),
    )
    collective = TopoAwareCollective(
        "gloo",
        "ethernet",
        way="hierarchical",
        between="int8",
        host=f"host-{rank // here}",
        timeout=seconds,
    )
    found: dict[str, Any] = {"error": "", "sum": 0.0, "seconds": 0.0}
    for step in range(count):
        began = time.monotonic()
        values = torch.arange(5000.0) * (rank + 1) + step
        try:
            collective.all_reduce(values)
        except RuntimeError as error:
            found |= {"error": str(error), "seconds": time.monotonic() - began}
            break
        found["sum"] += float(values.double().sum())
        time.sleep(pause)
        Path(os.environ["HASTEN_RENDEZVOUS"] + f".step-{step}").touch()
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group that has lost a rank has no orderly end


if __name__ == "__main__":
    steps(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
