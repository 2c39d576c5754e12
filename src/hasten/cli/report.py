"""``hasten report``: an experiment's table and page, or a training run's summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.cli.display import duration, size
from hasten.errors import InputError
from hasten.evidence.report import render_markdown, write_report


def report(run: Path) -> None:
    """Print what the run found; an experiment's page is written anew."""
    experiment = run if run.suffix == ".json" else run / "report.json"
    if experiment.is_file():
        found = _read(experiment)
        page = write_report(found, experiment.parent)
        print(render_markdown(found))
        print(f"report: {page}")
    elif (run / "summary.json").is_file():
        _summary(_read(run / "summary.json"))
    else:
        raise InputError(
            f"{run} holds neither report.json (of `hasten speedup`) nor summary.json (of "
            "`hasten train`); give the folder of a finished run"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a report: it holds a {type(found).__name__}")
    return found


def _summary(found: dict[str, Any]) -> None:
    try:
        rows = [
            ("steps", f"{found['steps']:,} ({found['stopped']})"),
            ("tokens", f"{found['tokens']:,}, of them trained {found['trained_tokens']:,}"),
            ("time", duration(found["seconds"])),
            ("tokens/s", _number(found["tokens_per_second"], "{:,.0f}")),
            ("MFU", _number(found.get("mfu"), "{:.1%}")),
            ("median step", f"{found['step_seconds_median']:.3f} s"),
            ("peak memory", size(found["peak_memory_bytes"])),
            ("held-out loss", _number(found["held_out_loss"], "{:.4f}")),
            ("ranks", str(found["world_size"])),
            ("saved", found["saved"]),
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"summary.json lacks or garbles {error}; was it edited?") from error
    for name, value in rows:
        print(f"{name:<14} {value}")


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
