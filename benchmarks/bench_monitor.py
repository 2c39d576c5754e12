"""How fast the monitor reads a long run, and what a page is sent; times are of one core.

python benchmarks/bench_monitor.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
from smoke import arguments

from hasten.monitor.run import Run
from hasten.monitor.watching import Cursor, page_update


def line(step: int) -> str:
    """A line of metrics.jsonl with all its fields."""
    found = {
        "step": step,
        "epoch": 0,
        "loss": 2 + 5 / (1 + step / 1000),
        "learning_rate": 2e-4,
        "grad_norm": 1.0 + step % 7 / 10,
        "tokens": 16384,
        "trained_tokens": 9000,
        "positions": 16500,
        "examples": 32,
        "step_seconds": 0.25 + step % 11 / 1000,
        "tokens_per_second": 65536.0 - step % 13,
        "padding_share": 0.01,
        "peak_memory_bytes": 51_000_000_000,
        "model_flops": 1e15,
        "mfu": 0.41,
        "skipped": False,
        "expert_load_ratio": 1.2,
        "data_seconds": 0.005,
        "passes_seconds": 0.22,
        "optimizer_seconds": 0.02,
    }
    return json.dumps(found) + "\n"


def measure(steps: int) -> list[tuple[str, str]]:
    """Rows of the table: what, and how much."""
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "metrics.jsonl").open("w") as file:
            file.writelines(map(line, range(1, steps + 1)))
        size = (Path(folder) / "metrics.jsonl").stat().st_size
        before, began = process.memory_info().rss, time.process_time()
        run = Run("run", Path(folder))
        while run.look():
            pass
        seconds = time.process_time() - began
        held = process.memory_info().rss - before
        cursor: Cursor = {}
        whole, first = _sent(run, cursor)
        with (Path(folder) / "metrics.jsonl").open("a") as file:
            file.write(line(steps + 1))
        began = time.process_time()
        run.look()
        look = time.process_time() - began
        news, second = _sent(run, cursor)
    return [
        ("lines", f"{steps:,} ({size / 1e6:,.0f} MB)"),
        (
            "read",
            f"{seconds:.2f} s, {steps / seconds:,.0f} lines/s, {size / seconds / 1e6:.0f} MB/s",
        ),
        ("memory that it took", f"{held / 1e6:.1f} MB"),
        ("points of a chart", f"{len(run.steps)}, {run.steps.stride} steps each"),
        ("first message", f"{whole / 1e3:,.0f} kB in {first * 1e3:.1f} ms"),
        ("a look at one new line", f"{look * 1e3:.2f} ms"),
        ("its message", f"{news / 1e3:.1f} kB in {second * 1e3:.1f} ms"),
    ]


def _sent(run: Run, cursor: Cursor) -> tuple[int, float]:
    began = time.process_time()
    text = json.dumps(page_update(run, cursor), separators=(",", ":"))
    return len(text), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    for steps in arguments(parser, steps=[1000]).steps:
        for name, value in measure(steps):
            print(f"{name:<24} {value}")
        print()


if __name__ == "__main__":
    main()
