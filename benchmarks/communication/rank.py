"""One rank of bench_communication.py: throughput in turns, or one whole training.

python rank.py speed|loss SPEC.json      the answer is a line of JSON on rank 0's output

Both can be cut off: throughput is noted after each round, a training that runs out of time is saved
on each rank and goes on when it is asked for again.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
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
LOOK = 10  # steps of a training between two looks at the clock


def main() -> None:
    what, spec = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    rank = gloo_rank.join(own_core=True)
    raw = bytearray(Path(spec["text"]).read_bytes())
    text = torch.frombuffer(raw, dtype=torch.uint8)
    found = speed(spec, rank, text) if what == "speed" else loss(spec, rank, text)
    if rank == 0:
        print("FOUND " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # groups of a dozen methods are not worth an orderly end


def speed(spec: dict[str, Any], rank: int, text: Tensor) -> dict[str, Any]:  # noqa: C901  # a turn of every method
    """Seconds per step of each method in each round, barrier to barrier, and bytes sent."""
    together = dist.new_group()
    given = (spec["size"], 0, rank, text[:-EVAL_DATA], spec["rows"])
    methods = {n: Method(n, *given) for n in spec["methods"]}
    kept = ("seconds", "bytes", "waited", "hidden")
    found: dict[str, Any] = {n: {key: [] for key in kept} for n in methods}
    names, limit = list(methods), Limit(spec.get("seconds"), together)
    progress, started = spec.get("progress"), time.perf_counter()
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
            if turn and progress:
                note = {**progress["note"], "seconds": time.perf_counter() - started}
                written(Path(progress["file"]), as_json, {**note, "found": found})
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
    """One training; the eval loss of the one model that all ranks have at the end.

    When ``seconds`` are over it pauses: ranks that train apart are brought together, each rank's
    state lies beside ``paused``, and the answer says after which step.
    """
    given = (spec["size"], spec["seed"], rank, text[:-EVAL_DATA], spec["rows"])
    method = Method(spec["method"], *given)
    place, began = Path(f"{spec['paused']}-{rank}"), time.perf_counter()
    past = gone_on(method, place)
    steps, limit = spec["steps"], Limit(spec.get("seconds"), dist.group.WORLD)
    for step in range(past["step"], steps):
        if step % LOOK == 0 and step > past["step"] and limit.over():
            method.settle()
            seconds = past["seconds"] + time.perf_counter() - began
            note = {"step": step, "seconds": seconds, "pauses": [*past["pauses"], step]}
            written(place, torch.save, {**note, "method": method.state()})
            return note
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        method.step(spec["rate"] * min(1.0, (step + 1) / 20) * decay)
    method.settle()
    checksum = torch.tensor([sum(p.double().sum().item() for p in method.net.parameters())])
    everyone = [torch.zeros_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, checksum)
    return {
        "loss": method.eval_data(text[-EVAL_DATA:]),
        "seconds": past["seconds"] + time.perf_counter() - began,
        "pauses": past["pauses"],
        "same_on_all_ranks": all(bool(c == checksum) for c in everyone),
    }


def gone_on(method: Method, place: Path) -> dict[str, Any]:
    """The method as it was when it paused, and what is noted of that; else of a beginning."""
    state: dict[str, Any] = {"step": 0}
    if place.exists():
        state = torch.load(place, weights_only=True)
    step = torch.tensor([state["step"]])
    everyone = [torch.zeros_like(step) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, step)
    if not step or any(bool(s != step) for s in everyone):  # cut off while it was being saved
        return {"step": 0, "seconds": 0.0, "pauses": []}
    method.load(state["method"])
    return state


def as_json(content: Any, place: Path) -> None:
    place.write_text(json.dumps(content))


def written(place: Path, write: Callable[[Any, Path], object], content: Any) -> None:
    """Whole or not at all."""
    beside = place.with_name(f"{place.name}.writing")
    write(content, beside)
    beside.replace(place)


if __name__ == "__main__":
    main()
