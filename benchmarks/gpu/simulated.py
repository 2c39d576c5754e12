"""Traces the rows' choices by simulation and keeps what their steps take, in ``paper.json``.

    python benchmarks/gpu/simulated.py [ROW ...]

It needs the CPU build of torch and a C++ compiler, and no GPU. A few layers and passes tell of all,
since they are alike; a choice that recomputes a share of the layers is traced whole. What is in the
file already is left as it is: remove the file to trace everything anew (half an hour).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("benchmarks", "src", "tools")]

from gpu_simulation.roofline import simulated_device  # noqa: E402
from gpu_simulation.simulated_device import simulate_devices  # noqa: E402

DEVICE, OTHERS = simulated_device("h200"), (simulated_device("h100"),)
if __name__ == "__main__":
    simulate_devices(DEVICE)  # before torch is imported

from gpu.measure import HastenVariant, examples_of  # noqa: E402
from gpu.predictions import FILE, SimulatedStep, choice_key, kept_steps  # noqa: E402
from gpu.rows import ROWS, Choice, Row  # noqa: E402
from gpu_simulation.step import PEAK, TOKENS, extrapolated, traced, treats_alike  # noqa: E402
from gpu_simulation.tracer import Key, Tracer, seconds_on  # noqa: E402
from hasten.core.plan import Plan  # noqa: E402

FEW = 2  # layers


def step_of(row: Row, choice: Choice) -> SimulatedStep:
    """A step of the whole model."""

    def at(layers: int, passes: int) -> Mapping[Key, float]:
        shape = {**row.shape, "num_hidden_layers": layers}
        few = replace(row, shape=shape, batch=passes * choice.examples)
        examples = examples_of(few)
        documents = [example.length for example in examples[: choice.examples]]
        tracer = Tracer(DEVICE, documents, OTHERS)
        return traced(lambda: HastenVariant(few, choice, "cuda:0", examples).session, tracer).counts

    fewest = FEW + row.shape.get("first_k_dense_replace", 0)
    fewest = fewest if treats_alike(Plan(choice.plan)) else row.layers
    counts = extrapolated(at, row.layers, row.batch // choice.examples, fewest)
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    named = {"seconds": DEVICE.name, **{seconds_on(other): other.name for other in OTHERS}}
    for (quantity, part, _), count in counts.items():
        if quantity in named:
            seconds[named[quantity]][part] += count
    syncs = sum(count for (quantity, *_), count in counts.items() if quantity == "syncs")
    rounded = {d: {p: round(s, 6) for p, s in parts.items()} for d, parts in seconds.items()}
    return SimulatedStep(round(counts[PEAK]), round(syncs), counts[TOKENS], rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", nargs="*", help="rows; all of them if none is named")
    names = parser.parse_args().row
    kept = {row: dict(steps) for row, steps in kept_steps().items()}
    for row in ROWS:
        steps = kept.setdefault(row.name, {})
        for choice in (c for choices in row.variants.values() for c in choices):
            key = choice_key(row, choice)
            if (names and row.name not in names) or key in steps:
                continue
            step = steps[key] = step_of(row, choice)
            print(f"{row.name}: {step.peak_bytes / 1e9:.2f} GB: {key}", flush=True)
            found = {name: {k: s.to_dict() for k, s in of.items()} for name, of in kept.items()}
            FILE.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the simulated device's threads don't end by themselves


if __name__ == "__main__":
    main()
