"""Fits the planner's constants to published measurements and says how well unseen ones are met.

    python benchmarks/planner/calibrate.py            # or: make calibrate

  1. read ``measurements.json``: figures that others published, each with its source
  2. grouped cross-validation: every group (software, model, device) predicted by a fit without it
  3. the same with whole software stacks left out
  4. fit all of it, and write ``src/hasten/planner/calibration.json`` with its provenance

The same measurements give the same constants to the last bit. Rows marked "recalled" weigh a
quarter, and are never quoted.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import held_out
import numpy as np
from held_out import DENSE, MOE, Cases, HeldOut, fit_memory, fit_seconds, read_records
from published import PublishedMeasurement

from hasten.planner.numbers import Calibration, Constants, MemoryConstants

HERE = Path(__file__).resolve().parent
MEASUREMENTS = HERE / "measurements.json"
RESULT = HERE.parents[1] / "src" / "hasten" / "planner" / "calibration.json"
SWEEPS = "megatron-deepspeed-bloom"  # the one stack that published sweeps over layouts
FIGURES = ("figure", "held out", "must", "target", "rows", "groups")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--folds", type=int, help="of groups; all groups one by one if left out")
    options = parser.parse_args()
    records = read_records(options.measurements)
    seconds = held_out.seconds(records, options.folds)
    new = held_out.seconds(records, by_stack=True)
    memory = held_out.memory(records, options.folds)
    constants, stacks = fit_seconds(Cases.of(held_out.timed(records)))
    held = fit_memory(Cases.of(held_out.weighed(records)))
    spread = held_out.spreads(seconds, new, memory, held)
    kept = Constants(**{f.name: getattr(constants, f.name) for f in fields(Constants)})
    fitted = Calibration(kept, held, stacks, spread)
    table = figures(seconds, memory, held) + out_of_memory(records, fitted)
    show(table)
    print("coverage: of held-out rows by P10-P90 made from the other groups' errors")
    per_stack(seconds)
    strangers(new)
    print("\nOne factor per software stack (seconds, times):")
    print("  " + ", ".join(f"{name} {factor:.3f}" for name, factor in sorted(stacks.items())))
    content = options.measurements.read_bytes()
    provenance = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/planner/calibrate.py",
        "measurements": options.measurements.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "records": len(records),
        "groups": len({r.group for r in records}),
        "held_out": {row[0]: row[1] for row in table},
    }
    whole = Calibration(kept, held, stacks, spread, provenance).to_dict()
    options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.out}")


def figures(seconds: HeldOut, memory: HeldOut, held: MemoryConstants) -> list[tuple[Any, ...]]:
    """What has to be shown: held-out figure, what it must be, what it should be, from how many."""
    dense, newest = seconds.chosen(DENSE), seconds.chosen(MOE, newest=True)
    errors = held_out.off(seconds.errors)
    stacks = held_out.by_stack(seconds, dense)
    mean = float(np.mean([median for median, _, _ in stacks.values()]))
    chosen = held_out.choice(seconds, SWEEPS)
    sweeps = len(chosen.regrets)
    bytes_off = held_out.off(-memory.errors)

    def of(rows: Any) -> tuple[int, int]:
        groups = {r.group for r, used in zip(seconds.records, rows, strict=True) if used}
        return int(np.sum(rows)), len(groups)

    low_p90, regrets = np.quantile(errors[dense], 0.9), chosen.regrets
    moe, kept = errors[newest], (len(bytes_off), memory.groups)
    doubts, every = held_out.in_doubts(memory, held), np.ones(len(bytes_off), dtype=bool)
    return [
        ("dense, median", _part(np.median(errors[dense])), "6 %", "5 %", *of(dense)),
        ("dense, p90", _part(low_p90), "18 %", "15 %", *of(dense)),
        (f"dense, mean of {len(stacks)} stacks", _part(mean), "9 %", "7 %", *of(dense)),
        ("MoE, newest release, median", _part(np.median(moe)), "25 %", "15 %", *of(newest)),
        ("MoE, newest release, p90", _part(np.quantile(moe, 0.9)), "", "35 %", *of(newest)),
        ("layout, mean regret", _part(np.mean(regrets)), "3 %", "3 %", sweeps, ""),
        ("layout, greatest regret", _part(max(regrets)), "", "10 %", sweeps, ""),
        ("layout, pairs in order", f"{chosen.concordance:.3f}", "0.78", "0.85", chosen.pairs, ""),
        ("memory, median", _part(np.median(bytes_off)), "10 %", "8 %", *kept),
        ("memory, p90", _part(np.quantile(bytes_off, 0.9)), "", "20 %", *kept),
        ("coverage, dense", _part(held_out.coverage(seconds, dense)), "75-90 %", "", *of(dense)),
        ("coverage, MoE", _part(held_out.coverage(seconds, newest)), "75-90 %", "", *of(newest)),
        ("coverage, memory", _part(held_out.coverage(doubts, every)), "75-90 %", "", *kept),
    ]


def out_of_memory(
    records: list[PublishedMeasurement], fitted: Calibration
) -> list[tuple[Any, ...]]:
    """Runs that ran out of memory and are called fitting; none of them is in the fit."""
    rows = [r for r in records if r.scope == "oom"]
    if not rows:
        return []
    held = Cases.of(rows).memory(fitted.memory)
    most = held.total * np.exp(fitted.quantiles("memory")[1] * held.doubt)
    fits = sum(b <= r.cluster.device.memory_bytes for r, b in zip(rows, most, strict=True))
    return [("out of memory, called fitting", f"{fits}", "0", "0", len(rows), "")]


def show(table: list[tuple[Any, ...]]) -> None:
    """The table in columns."""
    print("{:34} {:>9} {:>8} {:>8} {:>6} {:>7}".format(*FIGURES))
    for row in table:
        print("{:34} {:>9} {:>8} {:>8} {:>6} {:>7}".format(*row))


def per_stack(seconds: HeldOut) -> None:
    """Held-out median of every stack, dense rows."""
    print("\nDense, by stack: median error (rows, groups)")
    for name, found in held_out.by_stack(seconds, seconds.chosen(DENSE)).items():
        print(f"  {name:26} {found[0]:7.1%}  ({found[1]}, {found[2]})")


def strangers(found: HeldOut) -> None:
    """Whole stacks left out: software that the fit never met."""
    rows = found.chosen(DENSE)
    medians = [m for m, _, _ in held_out.by_stack(found, rows).values()]
    errors = held_out.off(found.errors[rows])
    print(
        f"\nWhole stacks left out, dense: median {np.median(errors):.1%}, p90 "
        f"{np.quantile(errors, 0.9):.1%}, mean over {len(medians)} stacks {np.mean(medians):.1%}"
    )
    after = []
    for stack in held_out.by_stack(found, rows):
        mine = found.errors[rows & np.array([r.stack == stack for r in found.records])]
        first = np.linspace(0, len(mine) - 1, 3).astype(int)
        rest = np.delete(mine, first) - np.median(mine[first])
        after += [float(np.median(held_out.off(rest)))] if len(mine) > 5 else []
    print(f"The same after three of their rows: mean over {len(after)} stacks {np.mean(after):.1%}")


def _part(value: Any) -> str:
    return f"{float(value):.1%}".replace("%", " %")


if __name__ == "__main__":
    main()
