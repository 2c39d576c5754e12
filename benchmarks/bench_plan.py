"""How long a plan takes: layouts enumerated, predicted, chosen and simulated, on one core.

    python benchmarks/bench_plan.py [--rounds 5]
    python benchmarks/bench_plan.py own --minutes 8     # how true it is: planner/own_machine.py

Prints per case the layouts, and the median seconds of each part over the rounds; the last column is
what 100,000 layouts take to predict.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

from smoke import arguments

from hasten.models.architecture import Architecture
from hasten.planner.cluster import Cluster
from hasten.planner.layout import PlannedJob
from hasten.planner.planning import LayoutSpace, enumerate_layouts, evaluate_layouts, plan

CASES = (
    ("deepseek-llm-7b", Cluster.preset("single_node", 1, 4, "a100"), PlannedJob(1024, 64, "lora")),
    ("deepseek-llm-7b", Cluster.preset("dgx_h100", 4), PlannedJob(4096, 1024)),
    ("deepseek-v2-lite", Cluster.preset("dgx_h100", 16), PlannedJob(4096, 1024)),
    ("deepseek-v3", Cluster.preset("fat_tree", 256, 8, "h800"), PlannedJob(4096, 15360)),
)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def row(name: str, cluster: Cluster, job: PlannedJob, rounds: int) -> list[str]:
    model, space = Architecture.from_config(name), LayoutSpace(lossy=True)
    count = len(enumerate_layouts(model, cluster, job, space))
    works: tuple[Callable[[], object], ...] = (
        lambda: enumerate_layouts(model, cluster, job, space),
        lambda: evaluate_layouts(model, cluster, job, space),
        lambda: plan(model, cluster, job, space=space),
    )
    taken = [[seconds(work) for work in works] for _ in range(rounds)]
    listed, predicted, whole = (statistics.median(t) for t in zip(*taken, strict=True))
    found = [name, str(cluster.devices), f"{count:,}", f"{listed:.2f}", f"{predicted:.2f}"]
    return [*found, f"{whole:.2f}", f"{(predicted - listed) / count * 1e5:.2f}"]


def main() -> None:
    if sys.argv[1:2] == ["own"]:
        from planner import own_machine

        few = ["--minutes", "0.1", "--first", "3"]
        own_machine.main(few if "--smoke" in sys.argv else sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = arguments(parser, rounds=1, CASES=CASES[:2]).rounds
    print("| model | devices | layouts | enumerate s | and predict s | whole plan s | 100,000: s |")
    print("|---|---|---|---|---|---|---|")
    for name, cluster, job in CASES:
        print("|", " | ".join(row(name, cluster, job, rounds)), "|", flush=True)


if __name__ == "__main__":
    main()
