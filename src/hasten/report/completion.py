"""What is added to a report once it stands: its cost, a published plan's claims, and the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.measure.ablation import Arm, Design
from hasten.report.bundle import bundle_of, stamp, write_bundle
from hasten.report.cost import cost_of_experiment
from hasten.report.preset_claims import preset_claims


def completed(
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
        report: as `hasten.report.findings.report_of` gives it.
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
    write_bundle(bundle, report, folder)
    return report
