"""When a worker of a trial is ready, one that is spawned or forked; and what taking turns costs.

    python benchmarks/bench_workers.py [--rounds 8] [--steps 12] [RECIPE] [key=value ...]

In each round one of either kind is started, in an order drawn anew, does so many steps, and ends;
the other waits until it is gone. Told are the seconds until each was ready and until it had ended,
and whether it trains as fast: the ratio of their median steps, paired by round, with its interval.

Before that two loops that do next to nothing take turns, in whole turns and in slices, one round of
these after the other. What a turn takes beyond its step is overhead: signals, pipes, the clocks of
the machine's load. ``--rounds 0`` measures nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from smoke import arguments

from hasten.machine import host
from hasten.machine.processes import LoadMeter
from hasten.measure.loops import loop_spec
from hasten.measure.recipe_experiment import prepared, recipe_worker
from hasten.measure.schedule import Turn, VariantProcess, run_round
from hasten.measure.statistics import paired_ratio
from hasten.measure.workers import WorkerPool
from hasten.progress import SilentProgress
from hasten.recipe.schema import load_recipe

EXAMPLE = Path(__file__).parents[1] / "examples" / "stdlib_tiny.yaml"
TIMEOUT = 600.0
ROUNDS_OF_TURNS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("recipe", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("overrides", nargs="*")
    small = ["max_examples=200", "cutoff_len=64", "global_batch_size=4"]
    asked = arguments(parser, rounds=2, steps=3, overrides=small, ROUNDS_OF_TURNS=10)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{host.hardware().short}, {time.strftime('%Y-%m-%d')}")
        for kind, costs in overhead(folder).items():
            low, middle, high = statistics.quantiles(costs, n=4)
            print(f"overhead of a turn, {kind}: {middle:.2f} ms (quartiles {low:.2f}, {high:.2f})")
        if not asked.rounds:
            return
        changes = [*asked.overrides, f"output={folder / 'out'}", "max_steps=1000000"]
        recipe = load_recipe(asked.recipe, changes)
        subject = prepared(recipe, SilentProgress())
        path = folder / "recipe.yaml"
        path.write_text(recipe.to_yaml())
        spec = recipe_worker(subject, path, subject.plan)
        seconds: dict[str, list[list[float]]] = {"spawned": [], "forked": []}

        def once(pool: WorkerPool) -> list[float]:
            began = time.monotonic()
            worker = pool.start(spec, "worker")
            worker.ready(TIMEOUT)
            ready = time.monotonic()
            steps = worker.request("steps", TIMEOUT, count=asked.steps)["steps"]
            done = time.monotonic()
            worker.close()
            late = steps[asked.steps // 3 :]
            speed = statistics.median(s["tokens"] / s["step_seconds"] for s in late)
            return [ready - began, time.monotonic() - done, speed]

        device = subject.context.device
        with (
            WorkerPool(folder / "spawned", device) as spawning,
            WorkerPool(folder / "forked", device, fork=True, recipe=path) as forking,
        ):
            if not forking.forks:
                raise SystemExit("processes can't be forked on this machine")
            first = once(forking)[0]
            draw, pools = random.Random(0), {"spawned": spawning, "forked": forking}
            for _ in range(asked.rounds):
                for kind in draw.sample(list(seconds), 2):
                    seconds[kind].append(once(pools[kind]))
    print(f"the first of all, imports included: ready after {first:.1f} s")
    for kind, rows in seconds.items():
        ready, ended, speed = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{kind:8}ready after {ready:5.2f} s, ended after {ended:5.2f} s, {speed:,.0f} tokens/s"
        )
    ratio = paired_ratio([r[2] for r in seconds["spawned"]], [r[2] for r in seconds["forked"]])
    print(f"forked over spawned: {ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")


def next_to_nothing() -> Callable[[], int]:
    """A loop of a millisecond a step."""

    def step() -> int:
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        return 1

    return step


def overhead(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of a turn beyond its step, by round."""
    found: dict[str, list[float]] = {"whole turns": [], "slices": []}
    draw, load = random.Random(0), LoadMeter(host.hardware().usable_cores)
    spec = replace(loop_spec(f"{Path(__file__).resolve()}:next_to_nothing"), slices=True)
    with WorkerPool(folder) as pool:
        variants = {place: VariantProcess(pool.start(spec, f"loop-{place}")) for place in range(2)}
        for variant in variants.values():
            variant.begin(2)
        for _ in range(ROUNDS_OF_TURNS):
            for kind in draw.sample(list(found), 2):
                began = time.perf_counter()
                turns = list(run_round(variants, 1, draw, load, slices=kind == "slices"))
                took = time.perf_counter() - began
                done = [turn for _, turn in turns if isinstance(turn, Turn)]
                steps = math.fsum(turn.steps[0]["step_seconds"] for turn in done)
                found[kind].append(1e3 * (took - steps) / len(done))
    return found


if __name__ == "__main__":
    main()
