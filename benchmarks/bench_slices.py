"""What slices of time gain: the demo's cumulative, measured in whole turns and in slices.

    python benchmarks/bench_slices.py [--rounds 4] [--pairs 2]

The two ways take turns, ``--pairs`` times. Of each row, the variance of its ratio to the baseline
from round to round, times the seconds of a round, says how long an interval of some width takes;
printed is that time in slices over that in whole turns, row by row and in the middle.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from smoke import arguments

from hasten.cli.demo import DESIGN, TECHNIQUES, recipe_for
from hasten.report.speedup import ablate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2)
    asked = arguments(parser, rounds=2, pairs=1)
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_for(Path(folder), gpu_bytes=0)
        own = {"plan": list(TECHNIQUES), "on_obstacle": "skip"}  # the demo fills it in itself
        recipe = recipe.model_copy(update=own)
        design = replace(DESIGN, rounds=asked.rounds, evaluations=0, budget_seconds=None)
        for number in range(asked.pairs):
            for slices in (False, True) if number % 2 == 0 else (True, False):
                way = replace(design, slices=slices)
                found[slices].append(ablate(recipe, "cumulative", design=way, fresh=True))
    print("| row | deviation, whole turns | in slices | time in slices over whole turns |")
    print("|---|---|---|---|")
    shares = []
    for row in range(1, len(found[True][0]["variants"])):
        whole, sliced = (_deviation(reports, row) for reports in (found[False], found[True]))
        share = (sliced / whole) ** 2 * _seconds(found[True]) / _seconds(found[False])
        shares.append(share)
        name = found[True][0]["variants"][row]["name"]
        print(f"| {name} | {whole:.1%} | {sliced:.1%} | {share:.2f} |")
    print(f"| median | | | {statistics.median(shares):.2f} |")


def _deviation(reports: list[dict[str, Any]], row: int) -> float:
    """Of the logarithm of a row's speed over the baseline's, from round to round."""
    variances = []
    for report in reports:
        base, variant = (report["variants"][i]["rounds"] for i in (0, row))
        variances.append(
            statistics.variance(math.log(a / b) for a, b in zip(variant, base, strict=True))
        )
    return math.sqrt(statistics.fmean(variances))


def _seconds(reports: list[dict[str, Any]]) -> float:
    """Of a round."""
    return statistics.fmean(report["design"]["round_seconds"] for report in reports)


if __name__ == "__main__":
    main()
