"""From measured arms, and what guard, ledger and prices found, to the report's dictionary.

Verdicts and ratios come from ``verdicts``, promises from ``claims``; here they are laid out under
the keys that docs/report-schema.md describes.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hasten.measure.ablation import Arm, Design
from hasten.measure.statistics import spread
from hasten.report.bundle import bundle_of, stamp, write_bundle
from hasten.report.claims import claims_of, preset_claims
from hasten.report.cost import cost_of_experiment
from hasten.report.gains import fastest_of_equal_quality
from hasten.report.schema import SCHEMA
from hasten.report.verdicts import (
    NOT_MEASURED,
    Guard,
    Judgement,
    interaction_of,
    judge_arms,
    last_loss,
    noise_of,
    quality,
    ratio_to,
    rebuilt_of,
)

FEWEST_STEPS = 8  # whose 5th and 95th percentile say anything


def report_of(
    arms: Sequence[Arm],
    *,
    title: str,
    command: str,
    hardware: Mapping[str, Any],
    versions: Mapping[str, str],
    recipe: Mapping[str, Any],
    currency: str | None = None,
    per_device_hour: float = 0.0,
    devices: int = 1,
    mfu: str | None = None,
    design: Mapping[str, Any] | None = None,
    invariance: Sequence[Mapping[str, Any]] | None = None,
    guard: Guard | None = None,
    cost: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report as ``docs/report-schema.md`` describes it; the first arm is the baseline.

    Args:
        arms: as measured; the last one is the result that the head of the page names.
        mfu: what the arms' MFU refers to and counts.
        design: how the experiment was run, as ``report.design``.
        invariance: what the self-test before the run found, as ``report.invariance``.
        guard: the proofs of equal quality, as ``report.guard``; the arms of a technique that is
            worse there are worse, however fast they are.
        cost: more keys for ``report.cost`` (energy, the experiment itself, payback), or others in
            the place of those computed here from ``currency``, ``per_device_hour``, ``devices``.
    """
    base, final = arms[0], arms[-1]
    judgements = judge_arms(arms, guard or ())
    rows = [_arm(arm, base, said) for arm, said in zip(arms, judgements, strict=True)]
    price = _cost(arms, currency, per_device_hour, devices)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "title": title,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "arms": rows,
        "claims": claims_of(final.plan, rows),
        "quality": quality(final, base, guard or ()),
        "noise": noise_of(arms),
        "interaction": interaction_of(arms),
        "design": _plain(design),
        "invariance": None if invariance is None else [dict(entry) for entry in invariance],
        "guard": None if guard is None else [dict(entry) for entry in guard],
        "samples": [{**s, "arm": arm.name} for arm in (base, final) for s in arm.samples],
        "hardware": dict(hardware),
        "versions": dict(versions),
        "recipe": dict(recipe),
        "seed": recipe["seed"],
        "cost": None if price is None and cost is None else {**(price or {}), **(cost or {})},
        "mfu": mfu,
    }
    best = fastest_of_equal_quality(report)
    return report | {"fastest": None if best is None else best["name"]}


def _plain(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if found is None else dict(found)


def _arm(arm: Arm, base: Arm, said: Judgement) -> dict[str, Any]:
    seconds = [s["step_seconds"] for s in arm.steps]
    slots, tokens = (sum(s[k] for s in arm.steps) for k in ("slots", "tokens"))
    measured = arm.failed is None and arm.rounds
    found: dict[str, Any] = {
        "name": arm.name,
        "kind": arm.kind,
        "techniques": [str(t) for t in arm.plan],
        "tokens_per_second": spread(arm.rounds).summary() if measured else NOT_MEASURED,
        "ratio": _ratio(arm, base),
        "against": said.against,
        "effect": NOT_MEASURED if said.effect is None else said.effect.summary(),
        "verdict": said.verdict,
        "quality": said.quality,
        "p_value": said.p_value,
        "corrected": said.corrected,
        "rounds_needed": said.rounds_needed,
        "rebuilt": rebuilt_of(arm, base),
        "luck": None if arm.luck is None else asdict(arm.luck),
        "peak_memory_bytes": _peak(arm),
        "held_out_loss": last_loss(arm),
        "held_out_curve": [list(point) for point in arm.held_out],
        "loss_curve": [list(point) for point in arm.losses],
        "rounds": arm.rounds,
        "beside": arm.beside or None,
        "foreign_load": arm.foreign_load or None,
        "warmup": arm.warmup or None,
        "padding_share": 1 - tokens / slots if slots else None,
        "mfu": _mfu(arm),
        "ledger": arm.ledger,
        "startup_seconds": {k: arm.startup_seconds.get(k) for k in ("imports", "data", "model")},
        "acted": arm.acted or _unknown(arm),
    }
    if len(seconds) > 1:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        found["step_seconds"] = {"p50": cuts[49], "p99": cuts[98]}
    if measured and len(seconds) >= FEWEST_STEPS:
        rates = [s["tokens"] / s["step_seconds"] for s in arm.steps if s["step_seconds"]]
        cuts = statistics.quantiles(rates, n=20, method="inclusive")
        found["throughput_spread"] = (cuts[18] - cuts[0]) / 2 / statistics.median(rates)
    return found


def _ratio(arm: Arm, base: Arm) -> dict[str, float | None]:
    ratio = ratio_to(arm, base)
    if ratio is None:
        return NOT_MEASURED
    return {"median": 1.0, "low": 1.0, "high": 1.0} if arm is base else ratio.summary()


def _mfu(arm: Arm) -> float | None:
    """Over all measured steps, each weighed by its time; None if any step's isn't known."""
    known = [(s.get("mfu"), s["step_seconds"]) for s in arm.steps]
    if not known or arm.failed is not None or any(share is None for share, _ in known):
        return None
    return float(sum(share * taken for share, taken in known) / sum(taken for _, taken in known))


def _unknown(arm: Arm) -> list[dict[str, Any]]:
    """One row per technique of an arm that ran, but couldn't say what its techniques did."""
    if arm.unfinished is None:
        return []
    return [{"technique": t.name(), "acted": None, "evidence": arm.unfinished} for t in arm.plan]


def _peak(arm: Arm) -> int | None:
    """What a failed arm had used by then says nothing of what it needs."""
    return arm.peak_memory_bytes if arm.failed is None else None


def _cost(
    arms: Sequence[Arm], currency: str | None, per_device_hour: float, devices: int
) -> dict[str, Any] | None:
    """Money per million tokens at each arm's median rate; None without a price."""
    if currency is None:
        return None
    per_million = {
        arm.name: per_device_hour * devices / 3600 / statistics.median(arm.rounds) * 1e6
        for arm in arms
        if arm.rounds and arm.failed is None
    }
    return {
        "currency": currency,
        "per_device_hour": per_device_hour,
        "per_million_tokens": per_million,
    }


# What is added to a report once it stands: its cost, a published plan's claims, and the bundle.


def complete_report(
    report: dict[str, Any],
    arms: Sequence[Arm],
    design: Design,
    folder: Path,
    *,
    price: Mapping[str, Any] | None = None,
    preset: Mapping[str, Any] | None = None,
    data: Sequence[Path] = (),
    energy: str = "not measured",
    earlier_seconds: float = 0.0,
) -> dict[str, Any]:
    """The report with all that follows from it; ``bundle.json`` is written into the folder.

    Args:
        report: as `report_of` gives it.
        arms: from which it was made.
        design: as it was asked for.
        folder: of the experiment.
        price: as `hasten.report.cost.cost_of_experiment` takes it.
        preset: the published plan that was measured, if it was one.
        data: the files of the records.
        energy: which counter the arms' joules are of, or why there is none.
        earlier_seconds: of experiments that led to this one; their cost is a part of its own.
    """
    joules = {arm.name: arm.joules_per_token for arm in arms if arm.failed is None}
    cost = cost_of_experiment(report, price, joules, source=energy, earlier_seconds=earlier_seconds)
    if cost is not None:
        report["cost"] = {**cost, **(report["cost"] or {})}
    if preset is not None:
        report["claims"] = [*report["claims"], *preset_claims(preset, report)]
    bundle = bundle_of(arms, design, report, [stamp(path) for path in data])
    write_bundle(bundle, folder)
    return report
