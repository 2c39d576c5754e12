"""After the run: what was predicted of each part of a step against what was measured.

A run's metrics know three parts (waiting for data, passes, optimizer); the prediction has ten. They
are gathered into what both can tell, so that no part is compared with another thing.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.planner.candidate import PlanCandidate, Span

WARM_UP = 3  # steps that are left out, where there are enough
# What a run measures -> the predicted parts that lie within it; data is predicted as nothing.
TERMS: Mapping[str, tuple[str, ...]] = {
    "passes": ("compute", "attention", "head", "recompute", "tp", "dp", "pp", "ep"),
    "optimizer": ("optimizer", "other"),
    "waiting for data": (),
}
_KEYS = {
    "passes": "passes_seconds",
    "optimizer": "optimizer_seconds",
    "waiting for data": "data_seconds",
}


@dataclass(frozen=True)
class Term:
    """One term: predicted, measured, and whether the measurement lies in the interval."""

    name: str
    unit: str
    predicted: float
    measured: float | None
    within: bool | None  # of P10-P90; None where the term has no interval of its own

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def closing(predicted: PlanCandidate, run: Path) -> list[Term]:
    """Predicted against measured per term, from the folder of a finished run.

    Raises:
        InputError: the folder has no metrics of steps that moved weights.
    """
    rows = measured_steps(run)
    step = _median(rows, "step_seconds")
    tokens = _median(rows, "slots")
    rate = tokens / step / predicted.devices if step and tokens else None
    memory = max(
        (float(r["peak_memory_bytes"]) for r in rows if r.get("peak_memory_bytes")), default=None
    )
    found = [
        _told("step", "s", predicted.step_seconds, step),
        _told("rate of a device", "tokens/s", predicted.tokens_per_second_per_device, rate),
        _told("peak memory", "bytes", predicted.memory_bytes, memory),
    ]
    for name, parts in TERMS.items():
        expected = sum(predicted.step_parts[part] for part in parts)
        found.append(Term(name, "s", expected, _median(rows, _KEYS[name]), None))
    return found


def measured_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, those of the warm-up and of discarded steps left out."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} can't be read ({why}): name the folder of a run") from error
    rows = [
        r for r in rows if isinstance(r, dict) and r.get("step_seconds") and not r.get("skipped")
    ]
    if not rows:
        raise InputError(f"{path} holds no step that moved weights: let the run go on for a while")
    return rows[WARM_UP:] if len(rows) > 2 * WARM_UP else rows


def table(terms: list[Term]) -> list[list[str]]:
    """Rows of words, the head first."""
    rows = [["term", "predicted", "measured", "measured/predicted", "in P10-P90"]]
    for term in terms:
        measured = "not measured" if term.measured is None else _number(term.measured, term.unit)
        ratio = "-" if term.ratio is None else f"{term.ratio:.2f}"
        within = {None: "-", True: "yes", False: "no"}[term.within]
        rows.append([term.name, _number(term.predicted, term.unit), measured, ratio, within])
    return rows


def _told(name: str, unit: str, span: Span, measured: float | None) -> Term:
    within = None if measured is None else span.low <= measured <= span.high
    return Term(name, unit, span.middle, measured, within)


def _median(rows: list[dict[str, Any]], key: str) -> float | None:
    known = [float(r[key]) for r in rows if isinstance(r.get(key), int | float)]
    known = [v for v in known if math.isfinite(v)]
    return statistics.median(known) if known else None


def _number(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.4g} {unit}"
