"""An experiment on a recipe: its arms, where its record lies, and the report of it.

    output/experiments/KEY/
      record.jsonl   every finished turn; a second start goes on from it, or answers at once
      recipe.yaml    the recipe as the arms' processes read it        arm-N.log   their own words

KEY stands for everything that decides the numbers: recipe, data, plans, design, hardware, versions,
hasten's own sources. Whatever of these changes makes another experiment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from hasten.cluster.ranks import places
from hasten.core.facts import Facts
from hasten.core.plan import Plan
from hasten.core.technique import Technique
from hasten.data.onewriter import alone_in
from hasten.errors import InputError
from hasten.evidence.ablation import (
    Design,
    Kind,
    Which,
    check_turns,
    plans_of,
    with_second_baseline,
)
from hasten.evidence.budget import expected_gain
from hasten.evidence.climb import Climb, by_gain, climb
from hasten.evidence.completion import completed
from hasten.evidence.controller import Measured, measure_arms, table
from hasten.evidence.energy import Meter, meter_of_run
from hasten.evidence.findings import report_of
from hasten.evidence.nursery import Nursery
from hasten.evidence.nursery import nursery as opened_nursery
from hasten.evidence.record import Record, key_of, source_digest
from hasten.evidence.trial import ENTRY
from hasten.machine import environment as environment_
from hasten.machine.environment import World
from hasten.recipe.build import plan_of
from hasten.recipe.ceiling import mfu_words
from hasten.recipe.presets import preset_of
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.sources import data_files
from hasten.run import ready

Order = Literal["slots", "gain"]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # decide the speed, and stand in no recipe


class Audience(Protocol):
    """Whoever is told how an experiment goes on; `hasten.cli.display.Display` is one.

    ``tell``: a line that stays; ``begin``: a new piece of work; ``show``: its state, and which
    share (0 to 1) of it is done.
    """

    def tell(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def show(self, text: str, share: float) -> None: ...


class Silence:
    """Nobody is told."""

    def tell(self, text: str) -> None: ...
    def begin(self) -> None: ...
    def show(self, text: str, share: float) -> None: ...


@dataclass(frozen=True)
class Subject:
    """A recipe whose data is ready, and what is known of it."""

    recipe: Recipe
    known: Facts
    plan: Plan
    data_key: str
    meter: Meter = field(default_factory=lambda: Meter("not measured"))


def ablate(
    recipe: Recipe | str | Path,
    arms: Which = "plan",
    *,
    only: Sequence[str] = (),
    design: Design | None = None,
    title: str = "What the plan gains",
    command: str = "hasten.evidence.ablate",
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


def environment(plan: Plan, known: Facts, transport: Mapping[str, str]) -> Mapping[str, str]:
    """What an arm's process starts with, as a training does: what the techniques wish, then the
    recipe's settings of the transport."""
    found: dict[str, str] = {}
    for technique in plan:
        found |= technique.environ(known)
    return {**found, **transport}


def prepared(recipe: Recipe | str | Path, audience: Audience, ranks: bool = False) -> Subject:
    """The recipe with its data ready, and what is known; ``ranks``: its arms may have several.

    Raises:
        InputError: an unusable recipe, or several ranks where there may be one alone.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe))
    if recipe.nproc > 1 and not ranks:
        raise InputError("nproc: only jobs of one process are measured here; set nproc: 1")
    if environment_.world().size > 1:
        raise InputError(
            "several ranks have been started by a launcher, and an experiment starts its own: run "
            "the command once, and say nproc: N in the recipe"
        )

    def tokenising(done: int, total: int) -> None:
        audience.show(f"tokenising {done:,}/{total:,} records", done / max(total, 1))

    known, plan, material = ready(recipe, audience.tell, tokenising, recipe.nproc)
    known = replace(known, world=World(size=recipe.nproc))
    # What ranks have without a technique the baseline has, too: it is no switch.
    usual = plan_of(recipe.model_copy(update={"plan": []}), known)
    switches = Plan(t for t in plan if t not in usual.techniques)
    return Subject(recipe, known, switches, material.note.key, meter_of_run(known))


def measured(
    subject: Subject,
    plans: Mapping[str, Plan],
    kinds: Mapping[str, Kind],
    design: Design,
    fresh: bool,
    audience: Audience,
    nursery: Nursery | None = None,
    began: float | None = None,
) -> Measured:
    """The experiment, from its record as far as that goes; a nursery spares arms their imports.

    A deadline counts from ``began``, so that the data's preparation is within it. There arms are
    forked, too: on a busy machine imports alone may take longer than all steps.
    """
    recipe, known = subject.recipe, subject.known
    if recipe.nproc > 1:
        check_turns(plans, design.steps)
    steps = {"max_steps": design.steps_in_all, "epochs": None, "max_tokens": None}
    resolved = recipe.model_copy(update=steps)
    key = _key(subject, resolved, plans, design)
    folder = Path(recipe.output) / "experiments" / key
    with alone_in(folder, audience.tell):
        if fresh:
            (folder / "record.jsonl").unlink(missing_ok=True)
        (folder / "recipe.yaml").write_text(resolved.to_yaml())
        hurried = design.deadline_seconds is not None
        with contextlib.ExitStack() as stack:
            since = began if hurried else None
            record = stack.enter_context(Record(folder / "record.jsonl", key, since))
            if record.done:
                audience.tell(f"measured before: {folder} (--fresh measures anew)")
            elif record.events:
                audience.tell(f"going on with {folder}; arms train again from their seed")
            audience.begin()
            path = folder / "recipe.yaml"
            own = partial(environment, known=known, transport=recipe.transport)
            ranks = partial(places, recipe.nproc, known.hardware.usable_cores)
            if hurried and nursery is None:
                log = folder / "nursery.log"
                forking = opened_nursery([*ENTRY, str(path)], log, known.device, recipe.nproc)
                nursery = stack.enter_context(forking)
            at = table(path, own, folder, known.device, meter=subject.meter, ranks=ranks)
            return measure_arms(
                replace(at, nursery=nursery),
                plans,
                design,
                audience.show,
                kinds=kinds,
                expected={name: expected_gain(plan, known) for name, plan in plans.items()},
                record=record,
            )


def _key(subject: Subject, resolved: Recipe, plans: Mapping[str, Plan], design: Design) -> str:
    known = subject.known
    return key_of(
        {
            "recipe": resolved.model_dump(mode="json", exclude={"price", "plan", "output"}),
            "data": subject.data_key,
            "plans": {name: plan.key for name, plan in plans.items()},
            "design": asdict(design),
            "hardware": {**asdict(known.hardware), "device": known.device},
            "threads": {name: environment_.variable(name) for name in THREADS},
            "versions": dict(known.versions),
            "source": source_digest(Path(__file__).parent),
        }
    )


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
