"""Whole models by simulation: launches, syncs, bytes, peak memory and roofline time, without a GPU.

    python benchmarks/bench_gpu_simulation.py [NAME ...] [--device h200]

The recipes are those of tests/common/simulated_recipes.py, whose bounds long tests hold the code
to. Nothing is measured: tokens per second are what the device's datasheet allows at most.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/common"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from smoke import arguments

from gpu_simulation.request import SimulatedTrace, traces
from hasten.errors import InputError
from simulated_recipes import WHOLE_MODELS


def line(name: str, found: SimulatedTrace) -> str:
    """A row of the page's table."""
    rank = found.ranks[0]
    each = rank.layers * rank.passes
    return (
        f"| {name} | {rank.total('syncs'):,.0f} | {rank.total('launches') / each:,.0f} "
        f"({rank.total('launches', 'optimizer'):,.0f}) "
        f"| {rank.total('bytes') / found.tokens / 1e6:,.0f} | {rank.peak_bytes / 1e9:.1f} "
        f"| {found.tokens / found.step_seconds:,.0f} | {found.mfu:.0%} "
        f"| {rank.host_seconds:.2f} / {rank.device_seconds:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(WHOLE_MODELS)}; all if left out")
    parser.add_argument("--device", default="h200")
    given = arguments(parser, name=list(WHOLE_MODELS)[:1])
    print(
        f"| by simulation, {given.device} | syncs | launches per layer and pass (optimizer's a "
        f"step) "
    )
    print("| MB a token | peak GB | tokens/s at most | MFU | host / device s |")
    for name in given.name or WHOLE_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            recipe = WHOLE_MODELS[name].recipe(Path(folder) / "model")
            found = traces([recipe], given.device)[0]
        said = f"{name}: {found}" if isinstance(found, InputError) else line(name, found)
        print(said, flush=True)


if __name__ == "__main__":
    main()
