"""What ``hasten tune`` found for a run's recipe, as a section of ``hasten report``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.report.runs import read_object

SHOWN = 3  # studies, the newest first; trials of each, the best first; decisions


def studies_of(run: Path) -> dict[str, dict[str, Any]]:
    """Finished studies by their folder, the newest first; one that can't be read says so."""
    found: dict[str, dict[str, Any]] = {}
    paths = [(p.stat().st_mtime, p) for p in (run / "studies").glob("*/study.json")]
    for _, path in sorted(paths, reverse=True):
        try:
            found[str(path.parent)] = read_object(path)
        except InputError as error:
            found[str(path.parent)] = {"said": str(error)}
    return found


def section(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The newest studies, a few lines each; empty where there is none."""
    lines = []
    for folder, study in list(found.items())[:SHOWN]:
        lines += ["", f"study of {study.get('study', 'speed')}: {study.get('said', 'not said')}"]
        try:
            lines += _best(study)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            lines.append(f"  its trials can't be read ({type(error).__name__}: {error})")
        lines.append(f"  page: {Path(folder) / 'study.html'}")
    if len(found) > SHOWN:
        lines.append(f"{len(found) - SHOWN} older studies beside it")
    return "\n".join(lines)


def _best(study: Mapping[str, Any]) -> list[str]:
    """The best trials, and which decisions mattered."""
    trials = [t for t in study.get("trials", ()) if t["log_rate"] is not None]
    lines = []
    for trial in sorted(trials, key=lambda t: -float(t["log_rate"]))[:SHOWN]:
        changed = ", ".join(f"{k}={v}" for k, v in trial["changes"].items()) or "as the recipe"
        if "loss" in trial:
            lines.append(f"  loss {trial['loss']:.4f}  {changed}")
        else:
            lines.append(f"  {math.exp(trial['log_rate']):.3f}× in its trial  {changed}")
    shares = [(n, s) for n, s in study.get("importance", {}).items() if s > 0]
    if shares:
        words = ", ".join(f"{name} {share:.0%}" for name, share in shares[:SHOWN])
        lines.append(f"  what mattered: {words}")
    return lines
