"""How soon two ranks train again after one was killed or stopped, and what watching costs a step.

    python benchmarks/bench_supervisor.py [--kills 10] [--stops 10]

Ranks are forked from a process with torch loaded, so that recovery is what the supervisor needs and
not what Python's imports need; a rank that is stopped is noticed after the limit, one second here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from smoke import arguments

from hasten.core.health import fingerprints
from hasten.machine.processes import Heartbeat

SOAK = Path(__file__).parents[1] / "tests" / "faults" / "rank_soak.py"


def recoveries(kills: int, stops: int) -> list[tuple[str, float]]:
    """What was done, and the seconds from then to the next step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(SOAK), folder, str(kills), str(stops), "11"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        ours, plain = (Path(folder) / p / "metrics.jsonl" for p in ("", "reference"))
        assert ours.read_text() == plain.read_text(), "the losses differ from a run without faults"
    found: list[tuple[str, float]] = [tuple(pair) for pair in json.loads(done.stdout)["recoveries"]]
    return found


def microseconds(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(times):
            work()
        taken.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=10)
    asked = arguments(parser, kills=1, stops=1)
    print("| fault | times | to the next step, median | longest |\n|---|---|---|---|")
    found = recoveries(asked.kills, asked.stops)
    for name in ("SIGKILL", "SIGSTOP"):
        seconds = [s for fault, s in found if fault == name]
        if seconds:
            middle = statistics.median(seconds)
            print(f"| {name} | {len(seconds)} | {middle:.2f} s | {max(seconds):.2f} s |")
    with tempfile.TemporaryDirectory() as folder:
        heartbeat = Heartbeat(Path(folder), 0)
        print(f"\na heartbeat: {microseconds(lambda: heartbeat.beat(1), 2000):.1f} us a step")
    weights = [torch.randn(1 << 20) for _ in range(50)]
    taken = microseconds(lambda: fingerprints(weights), 3) / 1e3
    size = sum(w.nbytes for w in weights) / 1e9
    print(f"a fingerprint: {taken:.0f} ms for {size:.2f} GB, {size / taken * 1e3:.1f} GB/s")


if __name__ == "__main__":
    main()
