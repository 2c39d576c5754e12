"""What a budget of tokens saves in padding, and what planning it costs: prints a table.

Slots and stragglers are counted, not timed; planning is timed per epoch.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from smoke import arguments

from hasten.parts.data.dynamic_batch import DynamicBatchSampler

EXAMPLES, BUDGET = 100_000, 8192


def main() -> None:
    arguments(argparse.ArgumentParser(description=__doc__), EXAMPLES=2000)
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5, 0.8, EXAMPLES).astype(int), 1, 4096)
    size = int(BUDGET / lengths.mean())
    order = draw.permutation(EXAMPLES)
    fixed = [order[i : i + size] for i in range(0, EXAMPLES, size)]
    slots = sum(int(lengths[b].max()) * len(b) for b in fixed)
    worst = max(int(lengths[b].max()) * len(b) for b in fixed)
    print(f"{EXAMPLES} examples, {lengths.sum()} tokens, budget {BUDGET}")
    print(f"{'batches':28} {'tokens/slots':>12} {'largest':>8} {'straggle':>9} {'plan s':>7}")
    print(
        f"{f'{size} examples, shuffled':28} {lengths.sum() / slots:12.4f} {worst:8} {'':9} {'':7}"
    )
    for world in (1, 2, 4):
        began = time.perf_counter()
        made = [
            DynamicBatchSampler(None, BUDGET, lengths=lengths, rank=r, world_size=world)
            for r in range(world)
        ]
        found = [list(sampler) for sampler in made]
        seconds = (time.perf_counter() - began) / world
        cost = np.array([[lengths[b].max() * len(b) for b in batches] for batches in found])
        straggle = cost.max(0).sum() / cost.mean(0).sum() - 1
        share = lengths.sum() / cost.sum()
        name = f"token budget, {world} rank(s)"
        print(f"{name:28} {share:12.4f} {cost.max():8} {straggle:9.4f} {seconds:7.2f}")


if __name__ == "__main__":
    main()
