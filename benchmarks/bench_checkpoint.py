"""What a checkpoint costs: how long it blocks the training, and how fast it is read back.

All ways take turns within a round, on the same state in the same folder; the table has medians over
rounds, ratios are taken within a round.

    python benchmarks/bench_checkpoint.py [--megabytes 500] [--rounds 5] [--folder DIR]

blocks: until training may go on. done: until the state is on the disk, forced. For the reading,
the files are in the page cache, as after a restart of the process; core: of processor time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from smoke import arguments
from torch import Tensor

from hasten.parts.checkpoint import load
from hasten.parts.checkpoint.saver import Saver
from hasten.parts.checkpoint.smart_checkpointer import SaveInterval

State = dict[str, Tensor]
Timing = tuple[float, float]
TORCH, STAGED = "torch.save + fsync", "asynchronous"


def state_of(megabytes: int) -> State:
    """Weights and AdamW's moments of square layers, with the spread of a trained model's."""
    side, found = 1024, {}
    torch.manual_seed(0)
    for layer in range(max(1, megabytes * 10**6 // (12 * side * side))):
        gradient = torch.randn(side, side) * 1e-4
        found[f"{layer}/weight"] = torch.randn(side, side) * 0.02
        found[f"{layer}/exp_avg"] = gradient * torch.rand(side, side)
        found[f"{layer}/exp_avg_sq"] = gradient.square() * torch.rand(side, side)
    return found


def with_torch(state: State, folder: Path, step: int) -> Timing:
    began = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    return seconds, seconds


def with_saver(saver: Saver) -> Callable[[State, Path, int], Timing]:
    saver.open()

    def timed(state: State, folder: Path, step: int) -> Timing:
        began = time.perf_counter()
        saver.save(step, state, {})
        blocked = time.perf_counter() - began
        saver.wait_for_writer()
        return blocked, time.perf_counter() - began

    return timed


def reading(read: Callable[[], object]) -> Timing:
    """Seconds on the wall, and of the processor."""
    began, worked = time.perf_counter(), time.process_time()
    read()
    return time.perf_counter() - began, time.process_time() - worked


def touched(state: State) -> float:
    """Every page of what was read: a mapped file isn't read before."""
    return sum(float(t.view(torch.int32).reshape(-1)[::512].sum()) for t in state.values())


def _loaded(path: Path) -> float:
    return touched(load(path)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    chosen = arguments(parser, megabytes=1, rounds=2)
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=chosen.folder))
    try:
        report(state_of(chosen.megabytes), place, chosen.rounds)
    finally:
        shutil.rmtree(place)


def report(state: State, place: Path, rounds: int) -> None:
    kinds: dict[str, tuple[bool | str, bool]] = {
        STAGED: (False, True),
        "in the step": (False, False),
        "shuffle": ("shuffle", False),
    }
    savers = {k: Saver(place / k, 2, c, asynchronous=a) for k, (c, a) in kinds.items()}
    ways = {TORCH: with_torch, **{k: with_saver(saver) for k, saver in savers.items()}}
    saved: dict[str, list[Timing]] = {name: [] for name in ways}
    read: dict[str, list[Timing]] = {name: [] for name in (TORCH, STAGED, "shuffle")}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            saved[name].append(way(state, place, turn + 1))
        for name, found in read.items():
            path = place / name / f"step-{turn + 1:08d}"
            if name == TORCH:
                found.append(reading(lambda: touched(torch.load(place / "state.pt"))))
            else:
                found.append(reading(partial(_loaded, path)))
        if not turn:  # the first round makes files and buffers
            for timings in (*saved.values(), *read.values()):
                timings.clear()
    size = sum(t.nbytes for t in state.values())
    print(f"{size / 1e6:.0f} MB, {rounds} rounds, {torch.get_num_threads()} thread(s) of torch\n")
    print("| saved by | blocks | of torch.save + fsync | done | size |\n|---|---|---|---|---|")
    for name, timings in saved.items():
        shares = [b / t for (b, _), (t, _) in zip(timings, saved[TORCH], strict=True)]
        blocked, done = (statistics.median(column) for column in zip(*timings, strict=True))
        files = place / name if name != TORCH else place
        latest = files / f"step-{rounds + 1:08d}" / "rank-00000.safetensors"
        on_disk = latest if name != TORCH else place / "state.pt"
        print(
            f"| {name} | {blocked:.3f} s | {statistics.median(shares):.1%} | {done:.2f} s "
            f"| {on_disk.stat().st_size / 1e6:.0f} MB |"
        )
    print("\n| read back | wall | GB/s per core |\n|---|---|---|")
    for name, timings in read.items():
        wall, core = (statistics.median(column) for column in zip(*timings, strict=True))
        checked = "" if name == TORCH else ", verified"
        print(f"| {name}{checked} | {wall:.2f} s | {size / core / 1e9:.2f} |")
    interval = SaveInterval(writing=savers[STAGED].writing_seconds)
    interval.blocked.append(statistics.median(b for b, _ in saved[STAGED]))
    seconds = interval.seconds()
    print(f"\ndynamic interval {seconds:.0f} s, blocked {interval.blocked[0] / seconds:.3%} of it")


if __name__ == "__main__":
    main()
