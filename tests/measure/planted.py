"""Experiments whose right answers are known, replayed from speeds that a real machine showed.

`data/step_speeds.json` holds the speed of every step of four copies of one real job that took turns
while the machine was busy. A replay strings blocks of consecutive rounds together, so that drift
and bursts stay as they were, deals the copies out as baseline, second baseline and variants,
multiplies each variant's planted effect in, and asks `report_of` for the verdicts, as `hasten
speedup` does.

Copies of one program differ for as long as they live, by a per cent or two here. Dealt anew for
each block they stand for variants that are built afresh; dealt once, for variants that were built
once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.ablation import Variant
from hasten.report.build import report_of
from hasten.report.judgement import verdict_word
from measure.planted_techniques import (
    ClaimsOnly,
    DoesNothing,
    LeaksDocuments,
    RuinsHeldOut,
    ScalesLoss,
    Waits,
)

RECORDED = Path(__file__).parent / "data" / "step_speeds.json"
COPIES = 4  # baseline, second baseline, and two that the variants share
BLOCK = 20  # rounds: bursts last seconds, a round well below one


@dataclass(frozen=True)
class Truth:
    """One planted variant: what it has, how fast it is, and what may be said of it."""

    name: str
    techniques: tuple[Technique, ...]
    speed: float  # tokens per second against the baseline
    right: tuple[str, ...]
    copy: int = 2  # whose noise it has

    @property
    def plan(self) -> Plan:
        """With the waiting of the baseline's, unless it has a waiting of its own."""
        own = any(isinstance(t, Waits) for t in self.techniques)
        return Plan(self.techniques if own else (*self.techniques, *BASELINE))


# The baseline waits a quarter of each step, so that "faster" can be planted: it waits less.
BASELINE = (Waits(0.25),)
TRUTHS = (
    Truth("nothing", (DoesNothing(),), 1.0, ("no effect", "undecided")),
    Truth("5 % slower", (Waits(1.25 / 0.95 - 1),), 0.95, ("hurt",)),
    Truth("5 % faster", (Waits(1.25 / 1.05 - 1),), 1.05, ("helped",), copy=3),
    Truth("leaks", (LeaksDocuments(),), 1.2, ("worse",)),
    Truth("scales the loss", (ScalesLoss(),), 1.0, ("worse",), copy=3),
    Truth("claims only", (ClaimsOnly(),), 1.0, ("no effect",)),
    Truth("fast and ruins", (Waits(0.0), RuinsHeldOut()), 1.25, ("worse",), copy=3),
)
Proofs = tuple[Sequence[Mapping[str, Any]], Mapping[str, float]]


def recorded() -> np.ndarray[Any, Any]:
    """Tokens per second of every step, (rounds, copies, steps)."""
    found: np.ndarray[Any, Any] = np.array(json.loads(RECORDED.read_text())["rounds"])
    return found


def replay(
    speeds: np.ndarray[Any, Any],
    rounds: int,
    seed: int,
    proofs: Proofs,
    truths: Sequence[Truth] = TRUTHS,
    built_once: bool = False,
) -> dict[str, str]:
    """The word that each truth gets in one experiment of so many rounds."""
    stretch = _drawn(speeds, rounds, np.random.default_rng(seed), built_once)
    entries, losses = proofs
    variants = [_variant("baseline", Plan(BASELINE), stretch[:, 0], losses["baseline"], "baseline")]
    variants.append(_variant("again", Plan(BASELINE), stretch[:, 1], losses["baseline"], "again"))
    for truth in truths:
        ruined = any(isinstance(t, RuinsHeldOut) for t in truth.techniques)
        loss = losses["ruined" if ruined else "baseline"]
        values = stretch[:, truth.copy] * truth.speed
        variants.append(_variant(truth.name, truth.plan, values, loss, "other"))
    return words_of(variants, entries)


def _drawn(
    speeds: np.ndarray[Any, Any], rounds: int, draw: np.random.Generator, built_once: bool
) -> np.ndarray[Any, Any]:
    """Blocks of consecutive rounds, (rounds, copies): each a turn's median, copies dealt."""
    dealt, blocks = draw.permutation(COPIES), []
    for _ in range(-(-rounds // BLOCK)):
        start = int(draw.integers(len(speeds) - BLOCK + 1))
        blocks.append(speeds[start : start + BLOCK, dealt])
        dealt = dealt if built_once else draw.permutation(COPIES)
    found: np.ndarray[Any, Any] = np.median(np.concatenate(blocks)[:rounds], axis=2)
    return found


def words_of(
    variants: Sequence[Variant], verification: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Each variant's word by the real path."""
    return {row["name"]: word_of(row) for row in rows_of(variants, verification)}


def word_of(row: Mapping[str, Any]) -> str:
    """A variant's word, its reason left out: that its model is worse, else its effect."""
    return "worse" if verdict_word(row["quality"]) == "worse" else verdict_word(row["verdict"])


def rows_of(
    variants: Sequence[Variant], verification: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each variant's row of the report, by the real path."""
    rows: list[dict[str, Any]] = report_of(
        variants,
        title="planted truths",
        command="",
        hardware={},
        versions={},
        recipe={"seed": 0},
        verification=verification,
    )["variants"]
    return rows


def counts(
    speeds: np.ndarray[Any, Any],
    rounds: int,
    proofs: Proofs,
    replays: int = 100,
    truths: Sequence[Truth] = TRUTHS,
    built_once: bool = False,
) -> dict[str, Counter[str]]:
    """How often each truth gets each word."""
    found: dict[str, Counter[str]] = {truth.name: Counter() for truth in truths}
    for seed in range(replays):
        words = replay(speeds, rounds, seed, proofs, truths, built_once)
        for name in found:
            found[name][words[name]] += 1
    return found


def right(found: Mapping[str, Counter[str]], truths: Sequence[Truth] = TRUTHS) -> dict[str, int]:
    """How often each truth got a right word."""
    return {truth.name: sum(found[truth.name][word] for word in truth.right) for truth in truths}


def _variant(
    name: str, plan: Plan, values: np.ndarray[Any, Any], loss: float, kind: Any
) -> Variant:
    effective = [
        {"technique": t.name(), "effective": not isinstance(t, ClaimsOnly), "evidence": "planted"}
        for t in plan
    ]
    return Variant(
        name,
        plan,
        rounds=[float(v) for v in values],
        steps=[],
        eval_data=[(0, 2 * loss), (1000, loss)],
        effective=effective,
        kind=kind,
    )
