"""Measure a recipe's techniques on its own job, and report what each gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.measure.ablation import Design, Kind, Which, plans_of, with_second_baseline
from hasten.measure.controller import Measured
from hasten.measure.experiment import Subject, measured, prepared
from hasten.progress import Audience, Silence
from hasten.recipe.peak_flops import mfu_words
from hasten.recipe.prepared_data import data_files
from hasten.recipe.preset_plans import preset_of
from hasten.recipe.schema import Recipe
from hasten.report.climb import Climb, by_gain, climb
from hasten.report.completion import completed
from hasten.report.findings import report_of

Order = Literal["slots", "gain"]


def ablate(
    recipe: Recipe | str | Path,
    arms: Which = "plan",
    *,
    only: Sequence[str] = (),
    design: Design | None = None,
    title: str = "What the plan gains",
    command: str = "hasten.report.ablate",
    fresh: bool = False,
    audience: Audience | None = None,
    also: Callable[[Subject], Mapping[str, Any]] = lambda subject: {},
) -> dict[str, Any]:
    """Measure a recipe's techniques on its own job; the report (docs/report-schema.md).

    Args:
        recipe: a recipe, or the path of one.
        arms: which plans are compared, see docs/speedup.md.
        only: techniques by name: arms that single out others are left out.
        design: how; eight rounds of four steps, and a second baseline, if left out.
        title: of the report.
        command: that repeats it.
        fresh: measure anew, whatever was measured before.
        audience: is told how it goes on.
        also: finds further arguments of `report_of` (guard, invariance, cost) beforehand.

    Raises:
        InputError: an unusable recipe, an empty plan, too small a budget.
    """
    audience, began = audience or Silence(), time.monotonic()
    subject = prepared(recipe, audience, ranks=True)
    design = design or Design(noise=True, seed=subject.recipe.seed)
    plans, kinds = plans_of(subject.plan, arms, only)
    if design.noise:
        plans, kinds = with_second_baseline(plans, kinds)
    further = also(subject)
    found = measured(subject, plans, kinds, design, fresh, audience, began=began)
    return _report(subject, found, design, title, command, further)


def gradual_optimize(
    recipe: Recipe | str | Path,
    *,
    order: Order = "slots",
    design: Design | None = None,
    title: str = "What gradual optimisation keeps",
    command: str = "hasten.gradual_optimize",
    fresh: bool = False,
    audience: Audience | None = None,
    also: Callable[[Subject], Mapping[str, Any]] = lambda subject: {},
) -> Climb:
    """Switch the recipe's techniques on one at a time, measure each, keep what pays.

    Each decision is an experiment with a record of its own, so that a climb that was interrupted
    goes on. At the end the plan that is left is measured against the baseline.

    Args:
        recipe: a recipe, or the path of one; its plan lists the techniques in question.
        order: in that of the slots, or by the gain each has alone, which is measured first.
        design: of every experiment; a budget holds for each.
        title, command, fresh, audience, also, and what is raised: as for `ablate`.
    """
    audience = audience or Silence()
    subject = prepared(recipe, audience, ranks=True)
    design = replace(design or Design(seed=subject.recipe.seed), noise=False)
    plans, kinds = plans_of(subject.plan, "alone")
    techniques: list[Technique] = list(subject.plan)
    seconds: list[float] = []  # of each experiment on the way
    if order == "gain" and len(techniques) > 1:
        found = measured(subject, plans, kinds, design, fresh, audience)
        techniques = by_gain(techniques, found.arms)
        seconds.append(found.design["seconds"])

    def measure(before: Plan, after: Plan) -> tuple[Any, Any]:
        (new,) = set(after.techniques) - set(before.techniques)
        audience.tell(f"does {new} pay on top of: {before}?")
        names = {"so far": before, f"+ {new.name()}": after}
        labels: dict[str, Kind] = dict(zip(names, ("baseline", "ladder"), strict=True))
        found = measured(subject, names, labels, design, fresh, audience)
        seconds.append(found.design["seconds"])
        return found.arms[0], found.arms[-1]

    climbed = climb(techniques, measure)
    if not len(climbed.plan):
        return climbed
    plans, kinds = with_second_baseline(*plans_of(climbed.plan, "plan"))
    further = also(subject)
    found = measured(subject, plans, kinds, design, fresh, audience)
    report = _report(subject, found, design, title, command, further, sum(seconds))
    report["design"]["climb"] = climbed.rows()
    return replace(climbed, report=report)


def _report(
    subject: Subject,
    found: Measured,
    design: Design,
    title: str,
    command: str,
    further: Mapping[str, Any],
    earlier_seconds: float = 0.0,
) -> dict[str, Any]:
    recipe, known = subject.recipe, subject.known
    report = report_of(
        found.arms,
        title=title,
        command=command,
        hardware={**asdict(known.hardware), "device": known.device},
        versions=known.versions,
        recipe=recipe.model_dump(mode="json"),
        mfu=mfu_words(recipe, known),
        design=found.design | ({"ranks": recipe.nproc} if recipe.nproc > 1 else {}),
        **further,
    )
    return completed(
        report,
        found.arms,
        design,
        Path(recipe.output),
        price=recipe.price.to_cost(known.world.size) if recipe.price else None,
        preset=preset_of(recipe.plan, recipe.nproc),
        data=data_files(recipe),
        energy=subject.meter.source,
        earlier_seconds=earlier_seconds,
    )
