r"""The cost model against measurements: per record the prediction, and how far off it was.

    python benchmarks/planner/accuracy.py benchmarks/planner/measurements.json [--json OUT]

Nothing is fitted here: the calibration of the package predicts, a stack that it knows with that
stack's factor. Records that can't be read or don't say enough are listed with the reason, and
count in no figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from published import PublishedMeasurement, read_record

from hasten.errors import InputError
from hasten.models.architecture import load_json
from hasten.planner.layout import Layouts
from hasten.planner.numbers import Calibration, calibrated
from hasten.planner.predict import Prediction, predict

_G = 1e9


def evaluate(path: Path, calibration: Calibration | None = None) -> dict[str, Any]:
    """Predictions for a file in the format of ``benchmarks/planner/measurements.json``.

    Raises:
        InputError: it isn't a list of records, or none of them can be predicted.
    """
    rows = load_json(path)
    if not isinstance(rows, list):
        raise InputError(f"{path} must hold a list of measurements")
    known = calibration or calibrated()
    done, skipped = [], []
    for place, row in enumerate(rows):
        name = row.get("id", place) if isinstance(row, Mapping) else place
        try:
            record = read_record(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            skipped.append({"id": name, "reason": lacks})
            continue
        if record is None:
            skipped.append({"id": name, "reason": "its micro-batch isn't known"})
            continue
        done.append(_row(record, name, known))
    if not done:
        reason = skipped[0]["reason"] if skipped else "it is empty"
        raise InputError(f"{path} holds no record that can be predicted: {reason}")
    return {
        "kind": "hasten planner accuracy",
        "calibration": dict(known.provenance),
        "records": done,
        "skipped": skipped,
        "summary": _summary(done),
    }


def _row(record: PublishedMeasurement, name: Any, known: Calibration) -> dict[str, Any]:
    found = predict(
        *(record.architecture, record.cluster, record.job, Layouts.of([record.layout])),
        calibration=known,
        stack=record.stack,
    )
    row: dict[str, Any] = {
        "id": name,
        "stack": record.stack,
        "scope": record.scope,
        "known_stack": record.stack in known.stacks,
        "predicted": _predicted(found),
        "measured": {},
    }
    rate, memory = record.tokens_per_second, record.memory_gb
    if rate:
        low, high = found.tokens_p10[0], found.tokens_p90[0]
        row["measured"]["tokens_per_s_per_gpu"] = rate
        row["error"] = float(found.tokens_per_second_per_device[0] / rate - 1)
        row["inside"] = bool(low <= rate <= high)
    if memory:
        row["measured"]["memory_GB"] = memory
        row["memory_error"] = float(found.memory_bytes[0] / _G / memory - 1)
    if record.scope == "oom":
        row["measured"]["oom"] = True
    return row


def _predicted(found: Prediction) -> dict[str, Any]:
    """One layout's figures; p10 and p90 are of tokens per second."""
    return {
        "tokens_per_s_per_gpu": float(found.tokens_per_second_per_device[0]),
        "iteration_s": float(found.step_seconds[0]),
        "memory_GB": float(found.memory_bytes[0] / _G),
        "p10": float(found.tokens_p10[0]),
        "p90": float(found.tokens_p90[0]),
        "memory_p10_GB": float(found.memory_p10[0] / _G),
        "memory_p90_GB": float(found.memory_p90[0] / _G),
        "mfu": float(found.mfu[0]),
        "fits": bool(found.fits[0]),
        "step": {part: float(value[0]) for part, value in vars(found.step).items()},
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if "error" in row]
    by_scope, by_stack = defaultdict(list), defaultdict(list)
    for row in timed:
        by_scope[row["scope"]].append(row)
        by_stack[row["stack"]].append(row)
    held = np.abs([row["memory_error"] for row in rows if "memory_error" in row])
    # Memory of a run that worked, called too much, is as wrong as the other way round.
    refused = [row for row in rows if "memory_error" in row and not row["predicted"]["fits"]]
    out = [row for row in rows if row["measured"].get("oom")]
    return {
        "all": _errors(timed),
        "by_scope": {name: _errors(found) for name, found in sorted(by_scope.items())},
        "by_stack": {name: _errors(found) for name, found in sorted(by_stack.items())},
        "memory": {
            "records": len(held),
            "median": float(np.median(held)) if len(held) else None,
            "p90": float(np.quantile(held, 0.9)) if len(held) else None,
            "wrongly_refused": len(refused),
        },
        "out_of_memory": {
            "records": len(out),
            "called_fitting": sum(row["predicted"]["fits"] for row in out),
        },
    }


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"records": 0, "median": None, "p90": None, "bias": None, "coverage": None}
    errors = np.array([row["error"] for row in rows])
    return {
        "records": len(rows),
        "median": float(np.median(np.abs(errors))),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.median(errors)),
        "coverage": float(np.mean([row["inside"] for row in rows])),
    }


def _outline(value: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            lines += [f"{indent}{key}", *_outline(inner, indent + "  ")]
        else:
            shown = f"{inner:.4g}" if isinstance(inner, float) else inner
            lines.append(f"{indent}{key}: {shown}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--json", type=Path, help="also write every record here")
    options = parser.parse_args()
    try:
        found = evaluate(options.measurements)
    except InputError as error:
        sys.exit(f"accuracy: {error}")
    print(f"{len(found['records'])} records predicted, {len(found['skipped'])} left out")
    print("\n".join(_outline(found["summary"], "  ")))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
