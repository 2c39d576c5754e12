"""The bubble of each schedule against its closed form, and what early receives hide on a link.

    python benchmarks/bench_pipeline.py bubbles --ranks 4 --micro-batches 8 --seconds 0.06
    python benchmarks/bench_pipeline.py link --rate 100mbit --kilobytes 256 --seconds 0.04

Stages sleep a fixed time in each pass (forward, gradient of inputs, of weights), so that two cores
are enough for any number of ranks. ``bubbles`` runs on the loopback interface and prints the
median of recorded steps, the least of them, and what passes of the measured lengths would leave
idle if messages took no time (``passes``), each as a ratio to what is expected too. Where the
papers give no closed form, the order of passes is simulated (``schedules.simulate``).
``link`` runs on two hosts of a lab (network namespaces with a link of that rate): a step with
messages of that size, receives posted early, and with torch's plain schedule, in turns with a step
that sends next to nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gloo_rank
from smoke import arguments

for folder in ("tests/common", "tools"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="bubbles", choices=("bubbles", "link"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.06, help="of each pass of a rank")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--kilobytes", type=float, default=256.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", help="comma-separated; all of them if left out")
    parser.add_argument("--as-rank", action="store_true", help="used by the script itself")
    asked = arguments(parser, ranks=2, micro_batches=4, seconds=0.01, rate="1gbit", rounds=1)
    if asked.as_rank:
        _rank(asked)
        return
    from netlab import Lab

    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--as-rank"]
    lab = Lab(1, asked.ranks, mode="loopback") if asked.what == "bubbles" else Lab(2, 1, asked.rate)
    with lab:
        found = gloo_rank.answer_of(lab, command, 550)
    (_bubble_table if asked.what == "bubbles" else _link_table)(found, asked)


def _bubble_table(found: dict[str, Any], asked: argparse.Namespace) -> None:
    from hasten.parts.distributed.pipeline.schedules import (
        StageSeconds,
        actions,
        bubble_share,
        ops,
        simulate,
        stages_per_rank,
    )

    print(
        f"{asked.ranks} ranks, {asked.micro_batches} micro-batches, F = I = W = {asked.seconds} s"
    )
    names = ("schedule", "median", "least", "passes", "expected", "ratios")
    print("{:<14}{:>8}{:>8}{:>8}{:>10}{:>19}".format(*names))
    for schedule, row in found.items():
        share, each = statistics.median(row["shares"]), stages_per_rank(schedule)
        listed = actions(schedule, asked.ranks, asked.micro_batches)
        even = StageSeconds.even(asked.ranks * each, 1 / each, 1 / each, 1 / each)
        cells = [[ops(action) for action in listed[r] if action] for r in listed]
        expected = bubble_share(simulate([[c for c in of_rank if c] for of_rank in cells], even))
        least = min(row["shares"])  # other people's work on the machine only adds
        passes = statistics.median(row["passes"])
        ratios = " ".join(f"{value / expected:.2f}" for value in (share, least, passes))
        print(
            f"{schedule:<14}{share:>8.4f}{least:>8.4f}{passes:>8.4f}{expected:>10.4f}{ratios:>19}"
        )


def _link_table(found: dict[str, Any], asked: argparse.Namespace) -> None:
    print(
        f"2 hosts, {asked.rate}, {asked.micro_batches} micro-batches, {asked.kilobytes:g} kB a "
        f"message, F = I = W = {asked.seconds} s"
    )
    print(f"{'schedule':<14}{'receives':<12}{'step s':>8}{'exposed s':>11}{'of it hidden':>14}")
    for schedule, row in found.items():
        for way in ("early", "plain"):
            exposed = [a - b for a, b in zip(row[way], row["no message"], strict=True)]
            hidden = 1 - statistics.median(exposed) / row["travel"]
            print(
                f"{schedule:<14}{way:<12}{statistics.median(row[way]):>8.3f}"
                f"{statistics.median(exposed):>11.3f}{hidden:>14.0%}"
            )


def _rank(asked: argparse.Namespace) -> None:
    import torch.distributed as dist

    gloo_rank.join(minutes=2)
    gloo_rank.answer(_bubbles(asked) if asked.what == "bubbles" else _link(asked))
    dist.barrier()
    dist.destroy_process_group()


def _pipeline(schedule: str, asked: argparse.Namespace, width: int, early: bool = True) -> Any:
    """A step of stages that sleep, with messages of so many numbers; and the pipeline."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    from hasten import AsyncPipeline
    from hasten.parts.distributed.pipeline.schedules import stages_per_rank
    from pipeline_rank_jobs import Asleep

    ranks, each = dist.get_world_size(), stages_per_rank(schedule)
    layers = [Asleep(*[asked.seconds / each] * 3) for _ in range(ranks * each)]
    pipeline = AsyncPipeline(ranks, 1, early, schedule=schedule)
    stages = pipeline.partition_model(nn.Sequential(*layers), [1.0] * len(layers))
    batch = torch.ones(asked.micro_batches, width), torch.ones(asked.micro_batches, width)

    def step() -> None:
        pipeline.step(stages, batch, F.mse_loss)

    step()  # builds the runtime and connects the ranks
    return pipeline, stages, step


def _bubbles(asked: argparse.Namespace) -> dict[str, Any]:
    from hasten.parts.distributed.pipeline.schedules import SCHEDULES, why_impossible

    found = {}
    for schedule in asked.schedules.split(",") if asked.schedules else SCHEDULES:
        if why_impossible(schedule, asked.ranks, asked.micro_batches):
            continue
        pipeline, stages, step = _pipeline(schedule, asked, 2)
        row: dict[str, Any] = {"shares": [], "passes": []}
        for _ in range(asked.rounds):
            with pipeline.recording(stages):
                step()
            row["shares"].append(pipeline.bubble)
            row["passes"].append(_without_waiting(pipeline.events))
        found[schedule] = row
    return found


def _without_waiting(events: Any) -> float:
    """The bubble that passes of these lengths leave in these orders if messages take no time.

    Of a measured step the rest is messages, and a machine that let ranks wait for its processors
    between two passes.
    """
    from hasten.parts.distributed.pipeline.schedules import bubble_share, simulate

    lengths = {(e.kind, e.stage, e.micro_batch): e.end - e.start for e in events}
    order: dict[int, list[Any]] = {}
    for e in sorted(events, key=lambda e: e.start):
        order.setdefault(e.rank, []).append(((e.kind, e.stage, e.micro_batch),))
    return bubble_share(simulate(list(order.values()), lengths.__getitem__))


def _link(asked: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    from netlab.network import bits_per_second

    width = int(asked.kilobytes * 1000 / 4)
    travel = 2 * asked.micro_batches * 8000 * asked.kilobytes / (bits_per_second(asked.rate) or 1)
    found: dict[str, Any] = {}
    for schedule in ("gpipe", "1f1b"):
        ways = {
            "early": _pipeline(schedule, asked, width)[2],
            "plain": _pipeline(schedule, asked, width, early=False)[2],
            "no message": _pipeline(schedule, asked, 2)[2],
        }
        row: dict[str, Any] = {name: [] for name in ways}
        for _ in range(asked.rounds):
            for name, step in ways.items():
                dist.barrier()
                began = time.perf_counter()
                step()
                row[name].append(time.perf_counter() - began)
        found[schedule] = {**row, "travel": travel}
    return found


if __name__ == "__main__":
    main()
