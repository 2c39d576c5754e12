"""What reading ahead saves: the data stall of a step, and the requests to a cold store.

    python benchmarks/bench_prefetcher.py [--steps 60] [--passes 5] [--scale 1]

Ways and orders take turns, pass by pass; medians over passes. The store sleeps, so it uses no
processor, like a disk or an object store; the step is matrix products on one thread. ``--scale``
makes both the step and the reading of its examples longer by that factor.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from smoke import arguments
from torch.utils.data import DataLoader
from turns import in_turns

from hasten.parts.data.prefetch import MergedReads, SmartPrefetcher

BATCH = 8
RECORD_SECONDS = 0.0006  # in quiet times: 4.8 ms a batch, with a step of about 12 ms
BURST_EVERY, BURST_SECONDS = 120, 0.06  # every 15th batch the store hangs
REQUEST_SECONDS, COLD_RECORDS = 0.005, 1024
WIDTH, WORKERS = 768, (1, 2, 4)  # of the products of a step; of the DataLoader


class SlowStore:
    """Examples of 512 tokens from a reader that is throttled and hangs now and then."""

    def __init__(self, steps: int, scale: int) -> None:
        self.steps, self.seconds = steps, scale * RECORD_SECONDS

    def __len__(self) -> int:
        return BATCH * self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        hangs = index % BURST_EVERY == BURST_EVERY - 1
        time.sleep(self.seconds + (BURST_SECONDS if hangs else 0.0))
        return torch.full((512,), index)


class ColdStore:
    """A store with a price per request and none per example."""

    requests = 0

    def __len__(self) -> int:
        return COLD_RECORDS

    def __getitem__(self, index: int) -> int:
        return self.read_range(index, index + 1)[0]

    def read_range(self, start: int, stop: int) -> Sequence[int]:
        time.sleep(REQUEST_SECONDS)
        self.requests += 1
        return range(start, stop)


def stall_share(
    batches: Iterable[Any], weight: torch.Tensor, scale: int
) -> tuple[float, float, float]:
    """(share of the pass that waited for data, that without the first batch, ms of a step)."""
    stall, first, began = 0.0, 0.0, time.perf_counter()
    asked = began
    for number, _ in enumerate(batches):
        waited = time.perf_counter() - asked
        stall, first = stall + waited, first if number else waited
        for _ in range(4 * scale):
            weight @ weight
        asked = time.perf_counter()
    seconds = asked - began
    return stall / seconds, (stall - first) / (seconds - first), 1e3 * seconds / (number + 1)


def stalls(steps: int, passes: int, scale: int) -> None:
    weight, store = torch.randn(WIDTH, WIDTH), SlowStore(steps, scale)
    plain = DataLoader(store, batch_size=BATCH)
    ways: dict[str, Iterable[Any]] = {"DataLoader, no reading ahead": plain}
    for workers in WORKERS:
        ways[f"DataLoader, {workers} persistent worker(s)"] = DataLoader(
            store,
            batch_size=BATCH,
            num_workers=workers,
            persistent_workers=True,
        )
    ways["SmartPrefetcher(4)"] = SmartPrefetcher(4).wrap(plain)
    passing = {name: partial(stall_share, way, weight, scale) for name, way in ways.items()}
    found = in_turns(passing, passes)  # the first pass starts workers
    base = statistics.median(ms for *_, ms in found["DataLoader, no reading ahead"])
    print("| way | data stall | after the first batch | ms per step | speed |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        share, later, step = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"| {name} | {100 * share:.1f} % | {100 * later:.1f} % | {step:.1f} "
            f"| {base / step:.2f}x |"
        )


def orders() -> dict[str, list[int]]:
    draw = random.Random(0)
    blocks = [list(range(s, s + 64)) for s in range(0, COLD_RECORDS, 64)]
    for block in blocks:
        draw.shuffle(block)
    everything = list(range(COLD_RECORDS))
    return {
        "sequential": everything,
        "strided by 4": [i for p in range(4) for i in range(p, COLD_RECORDS, 4)],
        "shuffled within blocks of 64": [i for block in blocks for i in block],
        "random": draw.sample(everything, COLD_RECORDS),
    }


def requests() -> None:
    print("\n| order | requests without | with detection | saved | seconds without | with |")
    print("|---|---|---|---|---|---|")
    for name, order in orders().items():
        row: list[tuple[int, float]] = []
        for detect in (False, True):
            store = ColdStore()
            reader = MergedReads(store) if detect else store
            began = time.perf_counter()
            for index in order:
                reader[index]
            row.append((store.requests, time.perf_counter() - began))
        (before, slow), (after, fast) = row
        saved = 100 * (1 - after / before)
        print(f"| {name} | {before} | {after} | {saved:.0f} % | {slow:.2f} | {fast:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of a pass")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1)
    chosen = arguments(parser, steps=4, passes=1, COLD_RECORDS=128, WIDTH=64, WORKERS=(1,))
    torch.set_num_threads(1)
    stalls(chosen.steps, chosen.passes, chosen.scale)
    requests()


if __name__ == "__main__":
    main()
