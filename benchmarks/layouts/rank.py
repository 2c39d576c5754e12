"""One rank of bench_layouts.py: every variant in turns, barrier to barrier.

python rank.py SPEC.json      the answer is a line of JSON on rank 0's output
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo_rank
from communication.links import sent_bytes

from hasten.core.step import training
from hasten.errors import InputError
from hasten.machine.environment import World
from layouts.table import ALONE, APART
from layouts.variants import Load, Variant, session, variants

TURN_SECONDS, MOST = 1.5, 10  # a turn has as many steps as fit, this many at most
WARM = 2  # steps before a variant's first turn


class Variants:
    """Sessions that take turns; those without a layout are one, alone on the first rank or apart
    on all of them."""

    def __init__(self, asked: list[str], load: Load, world: World) -> None:
        self.world, self.skipped = world, dict[str, str]()
        known = variants(world.size)
        chosen = {name: known[name] for name in asked if name in known}
        self._steps: dict[str, Any] = {}
        for name, variant in chosen.items():
            try:
                self._steps[name] = training(session(variant, load, world))
            except InputError as error:
                self.skipped[name] = str(error)  # the same on every rank: facts are
        self.models = {name: chosen[name].model for name in self._steps}
        for kind in sorted(set(self.models.values())):
            single = training(session(Variant(kind), load, World()))
            for way in (ALONE, APART):
                self._steps[f"{way} {kind}"] = single

    @property
    def names(self) -> list[str]:
        return list(self._steps)

    def turn(self, name: str, steps: int) -> int:
        """Tokens that all ranks together have trained on in so many steps."""
        kind, tokens = name.split()[0], 0
        if kind == ALONE and not self.world.is_main:
            return 0
        for _ in range(steps):
            tokens += next(self._steps[name]).tokens
        return tokens * self.world.size if kind == APART else tokens


def turns(spec: dict[str, Any], world: World) -> dict[str, Any]:
    """Tokens per second of each variant in each round, and bytes that this host sent a step."""
    together = dist.new_group()
    running = Variants(spec["variants"], Load(**spec["load"]), world)
    found: dict[str, Any] = {n: {"rate": [], "bytes": [], "steps": 1} for n in running.names}
    end, longest = time.monotonic() + spec["seconds"], 0.0
    for number in range(spec["rounds"] + 1):  # the first one warms up
        order = list(running.names)
        random.Random(number).shuffle(order)
        began = time.monotonic()
        for name in order:
            steps = found[name]["steps"] if number else WARM
            dist.barrier(together)
            start, before = time.perf_counter(), sent_bytes()
            tokens = running.turn(name, steps)
            dist.barrier(together)
            seconds, sent = time.perf_counter() - start, sent_bytes() - before
            if number:
                found[name]["rate"].append(tokens / seconds)
                found[name]["bytes"].append(sent / steps)
            else:
                each = first_says(seconds / steps, together)
                found[name]["steps"] = max(1, min(MOST, round(TURN_SECONDS / each)))
        longest = max(longest, time.monotonic() - began)
        if first_says(float(time.monotonic() + longest > end), together):
            break
    return {"variants": found, "models": running.models, "skipped": running.skipped}


def first_says(value: float, group: Any) -> float:
    """Rank 0's number, on every rank."""
    held = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(held, 0, group=group)
    return float(held.item())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = gloo_rank.join(own_core=True)
    found = turns(spec, World(rank, rank, dist.get_world_size()))
    if rank == 0:
        gloo_rank.answer(found)
    dist.barrier()
    os._exit(0)  # groups of a dozen layouts are not worth an orderly end


if __name__ == "__main__":
    main()
