"""Rows of report.guard and report.invariance, and the bounds that they are judged by.

Bounds are relative L2 errors of one step's gradient against float64, fixed here, before any run.
A float32 number has 24 bits and a step of a small model loses two or three digits of them in its
sums; bf16 has 8 bits, of which products that are summed in float32 keep the relative error near
2^-8 per layer. Where the bare job itself is less exact than the bound (a deep model), a technique
may be ``TIMES`` as far off as that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hasten.core.technique import Technique

FLOAT32, HALF = 1e-4, 5e-2  # of the whole gradient
TENSOR = 10.0  # a single tensor may be so many times as far off
TIMES, WIDEST = 4.0, 10.0  # of the bare job's own error; and at most so many times the bound
LOSS_FLOAT32, LOSS_HALF = 1e-5, 1e-2  # of a loss
LEAK_FLOAT32, LEAK_HALF = 1e-5, 1e-3  # of a document's loss, by changes of its neighbours
UPDATE = 1e-3  # of what the weights moved by in three steps
WIRE = 4e-3  # of numbers that travel in 16 bits: 2^-9 for each of two roundings of bf16
FAILED = ("differs", "worse")  # the words for a technique that does harm


@dataclass(frozen=True)
class Invariance:
    """One line of report.invariance."""

    what: str
    verdict: str  # equal | differs | not tested
    found: float | None
    tolerance: float | None
    text: str

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))


@dataclass(frozen=True)
class Owed:
    """One line of report.guard."""

    technique: str
    fidelity: str
    test: str
    verdict: str  # equal | not worse | worse | differs | inconclusive | not tested
    found: float | None
    allowed: float | None
    text: str
    seeds: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))


def owed(technique: Technique, test: str, verdict: str, text: str, **numbers: Any) -> Owed:
    """A line for a technique; ``numbers`` are found, allowed and seeds where there are any."""
    values = {"found": None, "allowed": None, **numbers}
    return Owed(technique.name(), technique.fidelity.name, test, verdict, text=text, **values)


def failures(report: Mapping[str, Any]) -> list[str]:
    """What of a guard's report says that a plan must not be used as it is."""
    found = [f"{r['what']}: {r['text']}" for r in report["invariance"] if r["verdict"] in FAILED]
    return found + [
        f"{r['technique']}: {r['text']}" for r in report["guard"] if r["verdict"] in FAILED
    ]


@dataclass(frozen=True)
class Bound:
    """How far a gradient may be from float64: as a whole, in each tensor, and its loss."""

    whole: float
    tensor: float
    loss: float

    def excess(self, answer: Mapping[str, Any]) -> float:
        """The largest error as a share of what is allowed; above 1 it fails."""
        shares = (
            answer["error"] / self.whole,
            answer["worst"] / self.tensor,
            answer["loss_error"] / self.loss,
        )
        return math.inf if any(math.isnan(s) for s in shares) else max(shares)

    def words(self, answer: Mapping[str, Any]) -> str:
        """The three errors, the one that fails first with what it may be."""
        said = [
            (answer["loss_error"], self.loss, "loss off by"),
            (answer["error"], self.whole, "gradient off by"),
            (answer["worst"], self.tensor, f"worst tensor {answer['name']} off by"),
        ]
        wrong = [f"{w} {e:.2g}, allowed {b:.2g}" for e, b, w in said if not e <= b]
        return "; ".join(wrong) or ", ".join(f"{w} {e:.1g}" for e, _, w in said)


def short(answer: Mapping[str, Any]) -> str:
    """The one error that says most."""
    return f"off by {answer['error']:.1g}"


def bound_of(half: bool, usual: Mapping[str, Any] | None) -> Bound:
    """The bound of a number format, widened to what the plan's own way of counting already has."""
    whole, loss = (HALF, LOSS_HALF) if half else (FLOAT32, LOSS_FLOAT32)
    if usual is None or "failed" in usual:
        return Bound(whole, TENSOR * whole, loss)
    seen = (usual["error"], usual["worst"], usual["loss_error"])
    if not all(map(math.isfinite, seen)):
        return Bound(whole, TENSOR * whole, loss)
    allowed = zip((whole, TENSOR * whole, loss), seen, strict=True)
    return Bound(*(max(fixed, min(TIMES * error, WIDEST * fixed)) for fixed, error in allowed))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no word for infinity: what isn't finite wasn't measured."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
