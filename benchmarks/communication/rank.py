"""One rank of bench_communication.py: throughput in turns, or one whole training.

python rank.py speed|loss SPEC.json      the answer is a line of JSON on rank 0's output
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo_rank

from communication.links import sent_bytes
from communication.methods import Method

WARM = {"stream": 12, "signs": 12}  # steps until what is found out has been found
EVAL_DATA = 200_000  # bytes at the end of the text


def main() -> None:
    what, spec = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    rank = gloo_rank.join(own_core=True)
    raw = bytearray(Path(spec["text"]).read_bytes())
    text = torch.frombuffer(raw, dtype=torch.uint8)
    found = speed(spec, rank, text) if what == "speed" else loss(spec, rank, text)
    if rank == 0:
        gloo_rank.answer(found)
    dist.barrier()
    os._exit(0)  # groups of a dozen methods are not worth an orderly end


def speed(spec: dict[str, Any], rank: int, text: Tensor) -> dict[str, Any]:
    """Seconds per step of each method in each round, barrier to barrier, and bytes sent."""
    together = dist.new_group()
    given = (spec["size"], 0, rank, text[:-EVAL_DATA], spec["rows"])
    methods = {n: Method(n, *given) for n in spec["methods"]}
    kept = ("seconds", "bytes", "waited", "hidden")
    found: dict[str, Any] = {n: {key: [] for key in kept} for n in methods}
    names, limit = list(methods), Limit(spec.get("seconds"), together)
    for turn in range(spec["rounds"] + 1):  # the first one warms up
        if turn > 1 and limit.over():
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            method = methods[name]
            steps = whole_rounds(method, spec["steps"].get(name, spec["block"]))
            dist.barrier(together)
            began, before = time.perf_counter(), sent_bytes()
            waited, hidden = method.waited(), method.hidden()
            for _ in range(steps if turn else max(WARM.get(method.kind, 4), steps // 2)):
                if method.kind != "alone" or rank == 0:
                    method.step()
            dist.barrier(together)
            if turn:
                found[name]["seconds"].append((time.perf_counter() - began) / steps)
                found[name]["bytes"].append((sent_bytes() - before) / steps)
                found[name]["waited"].append((method.waited() - waited) / steps)
                found[name]["hidden"].append((method.hidden() - hidden) / steps)
        if rank == 0:
            print(f"round {turn} of {spec['rounds']}", flush=True)
    for name, method in methods.items():
        method.settle()
        if method.kind in ("stream", "signs"):
            found[name]["fragments"] = f"{method.part.fragments} in {method.part.codec.name}"
    return found


def whole_rounds(method: Method, steps: int) -> int:
    """So many steps, or more until all turns have as many exchanges."""
    if method.kind not in ("diloco", "nesterov", "local"):
        return steps
    every = int(method.part.every)
    return -(-steps // every) * every


class Limit:
    """Whether another round fits, by rank 0's clock; all ranks ask after the same round."""

    def __init__(self, seconds: float | None, group: Any) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._since, self._group = time.perf_counter(), group

    def over(self) -> bool:
        now = time.perf_counter()
        last, self._since = now - self._since, now
        over = torch.tensor([float(self._end is not None and now + last > self._end)])
        dist.broadcast(over, 0, group=self._group)
        return bool(over.item())


def loss(spec: dict[str, Any], rank: int, text: Tensor) -> dict[str, Any]:
    """One training; the eval loss of the one model that all ranks have at the end."""
    given = (spec["size"], spec["seed"], rank, text[:-EVAL_DATA], spec["rows"])
    method, began, steps = Method(spec["method"], *given), time.perf_counter(), spec["steps"]
    for step in range(steps):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        method.step(spec["rate"] * min(1.0, (step + 1) / 20) * decay)
    method.settle()
    checksum = torch.tensor([sum(p.double().sum().item() for p in method.net.parameters())])
    everyone = [torch.zeros_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, checksum)
    return {
        "loss": method.eval_data(text[-EVAL_DATA:]),
        "seconds": time.perf_counter() - began,
        "same_on_all_ranks": all(bool(c == checksum) for c in everyone),
    }


if __name__ == "__main__":
    main()
