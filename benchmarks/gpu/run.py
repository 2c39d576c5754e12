"""The figures of docs/measurements/gpu.md: one row of it, or all by priority within a given time.

    python benchmarks/gpu/run.py --list
    python benchmarks/gpu/run.py --row full-8b-bf16 [--json FILE] [--minutes 8]
    python benchmarks/gpu/run.py --all --out FOLDER [--minutes 60]
    python benchmarks/gpu/run.py --table FOLDER

It needs the repository and nothing else: weights are random, of the published shapes, and records
are random tokens. What is given in minutes is the whole run's, the start and the model included.
``smoke`` runs anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from hasten.machine import host

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "benchmarks"), str(REPOSITORY / "src")]
# Read when torch starts: near the limit, pieces of memory of the wrong sizes would decide what fits
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from gpu.measure import OutOfTimeError, measure  # noqa: E402
from gpu.results import Found, listed, read, table, write  # noqa: E402
from gpu.rows import NAMES, TESTS, row_named  # noqa: E402
from hasten.errors import InputError  # noqa: E402
from hasten.machine import benchmark  # noqa: E402
from hasten.machine.accelerators import datasheet  # noqa: E402

MINUTES, ALL_MINUTES = 8.0, 60.0
LEAST = 1.0  # minutes that a row is begun for
CEILING_SECONDS = 12.0
SHARE_FOR_CEILING = 0.05  # of a row's time
PEERS = ("liger-kernel", "triton", "accelerate")


def machine(device: str, seconds: float) -> Found:
    """The device, what its maker promises and what its products reach, and the versions."""
    here = host.hardware()
    name = here.accelerators[0].name if device != "cpu" else here.short
    sheet = datasheet(name)
    # A processor may multiply bf16 in a loop, slower than float32.
    formats = benchmark.ON_CPU if device == "cpu" else ("bf16",)
    measured = benchmark.measure(device, name, formats, max(seconds, 0.5)).best(formats)
    versions = host.versions()
    for package in PEERS:
        if importlib.util.find_spec(package.replace("-", "_")):
            versions[package] = metadata.version(package)
    return {
        "device": device,
        "device_name": name,
        "accelerators": len(here.accelerators),
        "system": here.system,
        "versions": versions,
        "allocator": os.environ["PYTORCH_ALLOC_CONF"],
        "datasheet_flops_per_second": sheet.bf16 if sheet else None,
        "datasheet_source": sheet.source if sheet else None,
        "measured_flops_per_second": measured.best if measured else None,
    }


def run_row(name: str, path: Path | None, minutes: float) -> Found:
    """One row; what went wrong is said in its file too."""
    until = time.monotonic() + 60 * minutes
    device = host.default_device()
    found: Found = {
        "kind": "hasten gpu row",
        "row": name,
        "command": f"python benchmarks/gpu/run.py --row {name} --minutes {minutes:g}",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": "failed",
        "said": "stopped before the first repeat",
    }
    row = None if name == TESTS else row_named(name)
    if device == "cpu" and (row is None or row.needs_gpu):
        found["said"] = "there is no GPU here"
        write(path, found)
        return found
    write(path, found)
    seconds = min(CEILING_SECONDS, SHARE_FOR_CEILING * 60 * minutes)
    found["machine"] = machine(device, seconds if device != "cpu" else 0.5)
    try:
        if row is None:
            found |= gpu_tests(until)
        else:
            measure(row, device, found, path, until)
    except (MemoryError, OutOfTimeError, InputError) as error:
        found |= {"status": "failed", "said": str(error)}
    except BaseException as error:  # repeats that were there stay; the file says what ended it
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        status = "partial" if found.get("summary") else "failed"
        write(path, found | {"status": status, "said": why[:300]})
        raise
    write(path, found)
    return found


def gpu_tests(until: float) -> Found:
    """The tests that need a GPU: how many passed, and which didn't."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", "--no-header", "tests"]
    left = max(until - time.monotonic(), 1.0)
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "said": f"not done within {left:.0f} s"}
    lines = done.stdout.strip().splitlines()
    said = re.sub(r"=+ ?| ?=+", "", lines[-1]) if lines else "pytest said nothing"
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    status = "complete" if done.returncode == 0 else "failed"
    return {"status": status, "said": said, "tests": wrong, "exit_code": done.returncode}


def run_all(folder: Path, minutes: float) -> None:
    """Rows by priority, each in a process of its own, as long as there is time."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes
    for name in NAMES:
        left = (until - time.monotonic()) / 60
        if left < LEAST:
            print(f"{name}: no time left", flush=True)
            continue
        given = min(MINUTES, left)
        command = [sys.executable, __file__, "--row", name, "--minutes", f"{given:.2f}"]
        command += ["--json", str(folder / f"{name}.json")]
        try:  # a minute more than it was told to take: then it hangs
            subprocess.run(command, timeout=60 * given + 60, check=False)
        except subprocess.TimeoutExpired:
            print(f"{name}: hung, and was ended; its file has what it had measured", flush=True)
    print(table(read(folder)))


def said_of(found: Found) -> str:
    """A row's outcome in a few lines."""
    lines = [f"{found['row']}: {found['status']}" + (f", {found['said']}" if found["said"] else "")]
    for arm, value in found.get("summary", {}).items():
        low, high = value["low"], value["high"]
        within = f" [{low:,.2f}, {high:,.2f}]" if low is not None else ""
        lines.append(f"  {arm}: {value['median']:,.2f}{within}")
    for name, arm in found.get("arms", {}).items():
        lines.append(f"  {name}: {', '.join(arm['plan_words'])}")
        lines += [f"    {proof}" for proof in arm.get("proofs", [])]
    lines += [f"  left out: {reason}" for reason in found.get("left_out", [])]
    if found.get("peer", "").startswith("left out"):
        lines.append(f"  peer {found['peer']}")
    lines += [f"  {t['outcome']}: {', '.join(t['plan'])}" for t in found.get("tried", [])]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--row", help="the row to measure; --list names them")
    what.add_argument("--all", action="store_true", help="all rows by priority")
    what.add_argument("--list", action="store_true", help="name the rows")
    what.add_argument("--table", type=Path, metavar="FOLDER", help="the page's table of a folder")
    parser.add_argument("--json", type=Path, help="the row's file, whole after every repeat")
    parser.add_argument("--out", type=Path, default=Path("gpu-rows"), help="the folder of --all")
    parser.add_argument("--minutes", type=float, help="for the row (8), or for all rows (60)")
    given = parser.parse_args()
    if given.minutes is not None and not 0.05 <= given.minutes <= 24 * 60:
        parser.error(f"--minutes is {given.minutes:g}; give 0.05 to 1440")
    if given.table and not given.table.is_dir():
        parser.error(f"--table {given.table} is no folder; give the one of --out")
    if given.list or given.table:
        print(listed() if given.list else table(read(given.table)))
        return 0
    if given.all:
        run_all(given.out, given.minutes or ALL_MINUTES)
        return 0
    found = run_row(given.row, given.json, given.minutes or MINUTES)
    print(said_of(found))
    return 0 if found["status"] != "failed" else 1


if __name__ == "__main__":
    sys.exit(main())
