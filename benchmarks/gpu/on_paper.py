"""Traces the rows' choices on paper and keeps their peaks, which `gpu.memory` goes by.

    python benchmarks/gpu/on_paper.py [ROW ...]     # writes benchmarks/gpu/paper_peaks.json

It needs the CPU build of torch and a C++ compiler, and no GPU. A peak is that of live tensors; two
and three layers tell of all, since blocks are alike. What is in the file already is left as it is:
remove the file to trace everything anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "src")]

from hasten.measure.paper.pretended import begin  # noqa: E402
from hasten.measure.paper.roofline import paper_device  # noqa: E402

DEVICE = paper_device("h200")
if __name__ == "__main__":
    begin(DEVICE)  # before torch is imported

from gpu.measure import HastenArm, records_of  # noqa: E402
from gpu.memory import PEAKS, choice_key, kept_peaks  # noqa: E402
from gpu.rows import ROWS, Choice, Row  # noqa: E402
from hasten.core.plan import Plan  # noqa: E402
from hasten.measure.paper.step import PEAK, traced, treats_alike  # noqa: E402
from hasten.measure.paper.tracer import Tracer  # noqa: E402

FEW = 2  # layers


def peak(row: Row, choice: Choice) -> float:
    """Bytes of live tensors at most, in a step of the whole model."""

    def at(layers: int) -> float:
        batch = min(row.batch, 2 * choice.records)
        few = replace(row, shape={**row.shape, "num_hidden_layers": layers}, batch=batch)
        records = records_of(few)
        found = traced(lambda: HastenArm(few, choice, "cuda:0", records).session, Tracer(DEVICE))
        return found.counts[PEAK]

    layers, first = row.shape["num_hidden_layers"], at(FEW)
    return first if layers == FEW else first + (at(FEW + 1) - first) * (layers - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", nargs="*", help="rows; all of them if none is named")
    names = parser.parse_args().row
    peaks = kept_peaks()
    for row in ROWS:
        kept = peaks.setdefault(row.name, {})
        for choice in (c for choices in row.arms.values() for c in choices):
            key = choice_key(row, choice)
            if (names and row.name not in names) or key in kept:
                continue
            if not treats_alike(Plan(choice.plan)):  # few layers don't tell of a share of many
                continue
            kept[key] = round(peak(row, choice))
            print(f"{row.name}: {kept[key] / 1e9:.2f} GB: {key}", flush=True)
            PEAKS.write_text(json.dumps(peaks, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the pretended device's threads don't end by themselves


if __name__ == "__main__":
    main()
