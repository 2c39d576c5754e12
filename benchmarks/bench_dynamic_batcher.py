"""Steps until the size rests, and how near to the largest that fits: a simulated allocator.

Examples of random length, memory in proportion to the slots of the largest micro-batch above a
fixed part; prints a table. The last line is the cost of one batch and one reading of the memory.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
import torch
from smoke import arguments

from hasten.machine.memory import Headroom
from hasten.parts.data import collate
from hasten.parts.data.dynamic_batch import DynamicBatcher

LONGEST, FITS, THRESHOLD, STEPS = 2048, 16 * 2048, 0.8, 1000


def simulate(start: float, fixed: float) -> tuple[int, float, int, int]:
    """(first step within 90 % of what fits, final share of it, steps redone, late changes)."""
    draw, sizes, redone = np.random.default_rng(1), [], 0
    used = 0.0
    room = Headroom(int(start * FITS), 64 * FITS, 1.2, THRESHOLD, lambda: (used, 1.0))
    for _ in range(STEPS):
        lengths = draw.integers(LONGEST // 4, LONGEST + 1, 256).tolist()
        while True:
            load = max(max(p) * len(p) for p in collate.by_positions(lengths, lengths, room.size))
            used = fixed + (THRESHOLD - fixed) * load / FITS
            if used <= 1:
                break
            room.on_out_of_memory(load)
            redone += 1
        room.observe(load)
        sizes.append(room.size / FITS)
    outside = [i for i, size in enumerate(sizes) if size < 0.9]
    late = sum(a != b for a, b in itertools.pairwise(sizes[20:]))
    return (outside[-1] + 2 if outside else 1), sizes[-1], redone, late


def main() -> None:
    arguments(argparse.ArgumentParser(description=__doc__), STEPS=40)
    torch.set_num_threads(1)
    print(f"{'start':>6} {'fixed':>6} {'steps to 90 %':>14} {'final':>6} {'redone':>7} {'late':>5}")
    for start in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0):
        for fixed in (0.1, 0.5):
            steps, final, redone, late = simulate(start, fixed)
            print(f"{start:6} {fixed:6} {steps:14} {final:6.3f} {redone:7} {late:5}")
    batcher = DynamicBatcher(64, 64)
    batches = [(torch.zeros(64, 3, 32, 32), torch.zeros(64)) for _ in range(200)]
    began = time.perf_counter()
    for _ in batcher.batches(batches):
        batcher.update_after_step()
    print(f"one batch and one reading: {(time.perf_counter() - began) / 200 * 1e6:.0f} us")


if __name__ == "__main__":
    main()
