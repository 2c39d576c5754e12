"""The stages of a run: kernels against float64, the rows by priority, the tests, the report.

Each has a process of its own and its share of the time; what one leaves, the others get. A stage
that hangs or dies takes nothing along: its file holds what it had.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu import results
from gpu.measure import OutOfTimeError, config_of, context_of, measure
from gpu.results import Found, write
from gpu.rows import KERNELS, NAMES, ROWS, TESTS, Row, row_named
from hasten.errors import InputError
from hasten.machine import benchmark, host
from hasten.machine.accelerators import datasheet
from hasten.parts.kernels import registry
from hasten.parts.kernels.registry import Verdict
from hasten.recipe import gpu_check

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("run.py")
LEAST = 0.3  # minutes that a stage is begun for
OVERTIME = 15.0  # seconds after which a stage hangs
CEILING_SECONDS = 4.0
SHARE_FOR_CEILING = 0.05  # of a row's time
PEERS = ("liger-kernel", "triton", "accelerate")
FEW_LAYERS, FEW_EXAMPLES = 1, 4  # of a rehearsal
PRELOADED = ("torch._dynamo", "peft", "transformers.trainer", "gpu_simulation.step")


def run_all(folder: Path, minutes: float, rehearse: str | None = None) -> None:
    """Every stage within the time, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    if rehearse:
        _preload()
    until = time.monotonic() + 60 * minutes
    for place, name in enumerate(NAMES):
        left = (until - time.monotonic()) / 60
        given = left / (len(NAMES) - place)
        if given < LEAST:
            print(f"{name}: no time left", flush=True)
            continue
        path = folder / f"{name}.json"
        if rehearse:
            _fork(name, path, given, rehearse)
            continue
        command = [sys.executable, str(SCRIPT), "--row", name, "--minutes", f"{given:.2f}"]
        try:
            subprocess.run(
                [*command, "--json", str(path)], timeout=60 * given + OVERTIME, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: hung, and was ended; its file has what it had measured", flush=True)
    text = results.report(folder)
    (folder / "report.md").write_text(text + "\n")
    print(text)


def _preload() -> None:
    """Import what the stages of a rehearsal need, once for all of them."""
    from transformers import AutoModelForCausalLM

    for name in PRELOADED:
        importlib.import_module(name)
    for row in ROWS:
        mapping: Any = AutoModelForCausalLM._model_mapping
        mapping[type(config_of(row))]


def _fork(name: str, path: Path, minutes: float, rehearse: str) -> None:
    """A stage of a rehearsal in a fork: what it takes most time for is to import."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        os.waitpid(number, 0)
        return
    try:
        print(results.said_of(run_row(name, path, minutes, rehearse)), flush=True)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_row(name: str, path: Path | None, minutes: float, rehearse: str | None = None) -> Found:
    """One stage; what went wrong is said in its file too."""
    until = time.monotonic() + 60 * minutes
    row = None if name in (KERNELS, TESTS) else row_named(name)
    device = host.default_device()
    found: Found = {
        "kind": "hasten gpu row",
        "row": name,
        "command": f"python benchmarks/gpu/run.py --row {name} --minutes {minutes:g}",
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": "failed",
        "said": "stopped before the first repeat",
        "rehearsal": rehearse is not None,
    }
    if device == "cpu" and (row is None or row.needs_gpu):
        found["said"] = "there is no GPU here"
        write(path, found)
        return found
    write(path, found)
    try:
        if rehearse:
            _rehearsed(name, row, device, found, path, until)
        else:
            _stage(name, row, device, found, path, until)
    except (MemoryError, OutOfTimeError, InputError) as error:
        found |= {"status": "failed", "said": str(error)}
    except BaseException as error:  # repeats that were there stay; the file says what ended it
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        status = "partial" if found.get("summary") else "failed"
        write(path, found | {"status": status, "said": why[:300]})
        raise
    write(path, found)
    return found


def _stage(
    name: str, row: Row | None, device: str, found: Found, path: Path | None, until: float
) -> None:
    rehearsal = found["rehearsal"]
    seconds = min(CEILING_SECONDS, SHARE_FOR_CEILING * (until - time.monotonic()))
    found["machine"] = machine(device, seconds if row is not None and not rehearsal else 0.5)
    if name == KERNELS:
        found |= kernels(device, rehearsal)
    elif row is None:
        found |= gpu_tests(until, rehearsal)
    else:
        gpu_check.apply(kept_verdicts(path), found["machine"]["device_name"])
        measure(row, device, found, path, until)


def _rehearsed(
    name: str, row: Row | None, device: str, found: Found, path: Path | None, until: float
) -> None:
    """The same stage on the simulated device, where a row's model has few layers."""
    from gpu_simulation.roofline import simulated_device
    from gpu_simulation.step import on_simulated_device
    from gpu_simulation.tracer import Tracer

    if row is not None:
        layers = FEW_LAYERS + row.shape.get("first_k_dense_replace", 0)
        shape = {**row.shape, "num_hidden_layers": layers}
        row = dataclasses.replace(row, shape=shape, batch=min(row.batch, FEW_EXAMPLES))
    with on_simulated_device(Tracer(simulated_device("h100"))):
        _stage(name, row, device, found, path, until)


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
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "datasheet_flops_per_second": sheet.peak16 if sheet else None,
        "datasheet_source": sheet.source if sheet else None,
        "measured_flops_per_second": measured.best if measured else None,
    }


def kernels(device: str, rehearsal: bool) -> Found:
    """Each kernel on small inputs against float64, at the widths of the first row's model."""
    there = [kernel for kernel in registry.gpu_kernels() if not kernel.why_not(device)]
    if rehearsal:  # a simulated device gives no numbers
        return {"status": "complete", "said": f"{len(there)} kernels to try", "verdicts": []}
    sizes = gpu_check.sizes_of(context_of(ROWS[0], device, [1]).model)
    verdicts = registry.figures_of(there, device, sizes, fresh=True).proofs
    good = sum(not verdict.failed for verdict in verdicts.values())
    return {
        "status": "complete" if good == len(there) else "failed",
        "said": f"{good} of {len(there)} are right",
        "verdicts": [
            {"kernel": name, "why": verdict.failed, "repeats": verdict.repeats}
            for name, verdict in verdicts.items()
        ],
        "silent": sorted({kernel.key for kernel in there} - set(verdicts)),
    }


def kept_verdicts(path: Path | None) -> dict[str, Verdict]:
    """What the stage of kernels found, if it has run; rows go without those that failed."""
    file = path.with_name(f"{KERNELS}.json") if path else None
    rows = json.loads(file.read_text()).get("verdicts", []) if file and file.exists() else []
    return {row["kernel"]: Verdict(failed=row["why"], repeats=row["repeats"]) for row in rows}


def gpu_tests(until: float, rehearsal: bool) -> Found:
    """The tests that need a GPU: how many passed, and which didn't; a rehearsal collects them."""
    files = [
        str(file)
        for file in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if re.search(r"mark\.gpu|triton_marks", file.read_text())
    ]
    asked = ["--collect-only"] if rehearsal else ["-rfEs"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--no-header", *asked]
    left = max(until - time.monotonic(), 1.0)
    # Where only the repository is, the package isn't installed: pytest finds it as this script does
    sources = [str(REPOSITORY / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [*command, *files],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sources)},
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "said": f"not done within {left:.0f} s"}
    lines = done.stdout.strip().splitlines()
    said = re.sub(r"=+ ?| ?=+", "", lines[-1]) if lines else "pytest said nothing"
    wrong = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    status = "complete" if done.returncode == 0 else "failed"
    return {"status": status, "said": said, "tests": wrong, "exit_code": done.returncode}
