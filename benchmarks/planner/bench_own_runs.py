"""Measures how well one or three runs on this machine foretell other batches, lengths, models.

    python benchmarks/planner/bench_own_runs.py

One thread, fp32, AdamW; times are the process's own processor time, so that neighbours on a busy
machine disturb less. The first runs of the list calibrate, all others are predicted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from smoke import arguments
from transformers import AutoModelForCausalLM

from hasten.machine.accelerators import Device
from hasten.models.architecture import Architecture
from hasten.models.presets import build_config, preset
from hasten.planner.cluster import Cluster
from hasten.planner.layout import Layouts, PlannedJob, PlannedLayout
from hasten.planner.own_runs import OWN_STACK, OwnRun, calibrate_machine
from hasten.planner.predict import predict

# (model, micro-batch, micro-batches of a step, sequence); the first calibrate
RUNS = [
    ("deepseek-llm-tiny", 4, 1, 256),
    ("deepseek-llm-tiny", 1, 1, 128),
    ("deepseek-llm-tiny", 8, 1, 128),
    ("deepseek-llm-tiny", 4, 1, 128),
    ("deepseek-llm-tiny", 2, 2, 256),
    ("deepseek-llm-tiny", 1, 1, 512),
    ("deepseek-llm-tiny", 2, 1, 512),
    ("deepseek-llm-tiny", 1, 4, 128),
    ("deepseek-llm-small", 1, 1, 128),
    ("deepseek-llm-small", 4, 1, 128),
    ("deepseek-llm-small", 8, 1, 128),
    ("deepseek-llm-small", 4, 1, 256),
    ("deepseek-llm-small", 1, 1, 512),
    ("deepseek-llm-small", 1, 4, 128),
]
WARM_UP, STEPS, SIDE, COPIED = 2, 8, 1024, 1 << 26


def ceilings() -> tuple[float, float]:
    """The best product in FLOP/s and the best copy in bytes per second, of one thread."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    x, y = torch.randn(COPIED), torch.empty(COPIED)
    products = [_spent(lambda: torch.mm(a, b)) for _ in range(20)]
    copies = [_spent(lambda: y.copy_(x)) for _ in range(5)]
    return 2 * SIDE**3 / min(products), 2 * 4 * COPIED / min(copies)


def _spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def median_step(name: str, micro_batch: int, count: int, sequence: int) -> float:
    """Seconds of a step of that shape."""
    config = build_config(preset(name))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(0, config.vocab_size, (micro_batch, sequence))

    def step() -> None:
        for _ in range(count):
            (model(input_ids=batch, labels=batch).loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return statistics.median([_spent(step) for _ in range(STEPS)][WARM_UP:])


def main() -> None:
    small = [("deepseek-llm-tiny", n, 1, 8) for n in (1, 2, 3, 4)] + [
        ("deepseek-llm-small", 1, 1, 8)
    ]
    parser = argparse.ArgumentParser(description=__doc__)
    arguments(parser, RUNS=small, STEPS=4, SIDE=64, COPIED=1 << 16)
    torch.set_num_threads(1)
    peak, memory = ceilings()
    print(f"one thread: {peak / 1e9:.0f} GFLOP/s in fp32, {memory / 1e9:.1f} GB/s")
    chip = Device("cpu", peak, 64e9, memory, 1e9, 1, 1, peak32=peak, reached16=peak, reached32=peak)
    cluster = Cluster(chip, 1, 1, 1e9, 1e9, topology="single_node")
    runs = []
    for name, micro_batch, count, sequence in RUNS:
        layout = PlannedLayout(zero=0, micro_batch=micro_batch, precision="fp32")
        seconds = median_step(name, micro_batch, count, sequence)
        job = PlannedJob(sequence, micro_batch * count)
        runs.append(OwnRun(Architecture.from_config(name), cluster, job, layout, seconds))
    for learned in (1, 3):
        show(runs, learned)


def show(runs: list[OwnRun], learned: int) -> None:
    """All runs against what a calibration by the first ones predicts of them."""
    known = calibrate_machine(runs[:learned])
    print(f"\ncalibrated by the first {learned}")
    print(f"{'model':20} {'batch':>5} {'micro':>5} {'length':>6} {'s':>8} {'predicted':>9}")
    errors = []
    for run in runs:
        columns = Layouts.of([run.layout])
        found = predict(run.architecture, run.cluster, run.job, columns, known, OWN_STACK)
        predicted = float(found.step_seconds[0])
        error = predicted / run.step_seconds - 1
        errors.append(abs(error))
        print(
            f"{run.architecture.name:20} {run.job.global_batch:5} {run.layout.micro_batch:5} "
            f"{run.job.sequence:6} {run.step_seconds:8.4f} {predicted:9.4f} {error:+7.1%}"
        )
    same = sum(run.architecture == runs[0].architecture for run in runs)
    for words, rest in (("same model", errors[learned:same]), ("another", errors[same:])):
        print(f"{words}: median {statistics.median(rest):.1%}, worst {max(rest):.1%}")


if __name__ == "__main__":
    main()
