"""The figures of benchmarks/results/gpu.md: all of them in one go, or one row.

    python benchmarks/gpu/run.py --all --out FOLDER [--minutes 9]
    python benchmarks/gpu/run.py --row full-8b-bf16 [--json FILE] [--minutes 3]
    python benchmarks/gpu/run.py --all --out FOLDER --rehearse h100
    python benchmarks/gpu/run.py --list
    python benchmarks/gpu/run.py --report FOLDER

It needs the repository and no download: weights are random, of the published shapes, and examples
are random tokens. What is given in minutes is the whole run's, the start and the models included.
A rehearsal runs the same on a simulated GPU, with models of few layers; its times mean nothing.
``smoke`` runs anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("benchmarks", "src", "tools")]
# Read when torch starts: near the limit, pieces of memory of the wrong sizes would decide what fits
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
from gpu_simulation.roofline import simulated_device  # noqa: E402
from hasten.errors import InputError  # noqa: E402

MINUTES, ALL_MINUTES = 3.0, 9.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="everything, and a report")
    what.add_argument("--row", help="the row to measure; --list names them")
    what.add_argument("--list", action="store_true", help="name the rows")
    what.add_argument("--report", type=Path, metavar="FOLDER", help="the report of a folder")
    parser.add_argument("--json", type=Path, help="the row's file, whole after every repeat")
    parser.add_argument("--out", type=Path, default=Path("gpu-rows"), help="the folder of --all")
    parser.add_argument("--minutes", type=float, help="for the row (3), or for everything (9)")
    parser.add_argument("--rehearse", metavar="GPU", help="by simulation, on a GPU of this name")
    given = parser.parse_args()
    if given.minutes is not None and not 0.05 <= given.minutes <= 24 * 60:
        parser.error(f"--minutes is {given.minutes:g}; give 0.05 to 1440")
    if given.report and not given.report.is_dir():
        parser.error(f"--report {given.report} is no folder; give the one of --out")
    if given.rehearse:
        try:
            simulated_device(given.rehearse)
        except InputError as error:
            parser.error(f"--rehearse: {error}")
    return given


def main() -> int:
    given = arguments()
    if given.rehearse and (given.row or given.all):
        from gpu_simulation.simulated_device import simulate_devices

        simulate_devices(simulated_device(given.rehearse))  # before torch is imported
    from gpu import results, stages

    if given.list or given.report:
        print(results.listed() if given.list else results.report(given.report))
        return 0
    if given.all:
        stages.run_all(given.out, given.minutes or ALL_MINUTES, given.rehearse)
        return _ended(0, given)
    found = stages.run_row(given.row, given.json, given.minutes or MINUTES, given.rehearse)
    print(results.said_of(found), flush=True)
    return _ended(0 if found["status"] != "failed" else 1, given)


def _ended(code: int, given: argparse.Namespace) -> int:
    if given.rehearse:
        sys.stdout.flush()
        os._exit(code)  # the simulated device's threads don't end by themselves
    return code


if __name__ == "__main__":
    sys.exit(main())
