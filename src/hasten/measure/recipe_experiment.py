"""An experiment on a recipe: its variants, the files of its record, and its report.

The folder output/experiments/KEY has these files:

- record.jsonl: Every finished turn. A second start continues it, or is done at once.
- recipe.yaml: The recipe that the variants' processes read.
- variant-N.log: The output of each variant.

KEY is the hash of everything that decides the numbers: recipe, data, plans, design,
hardware, versions, hasten's own sources. A change in any of these makes another
experiment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hasten.core.context import JobContext
from hasten.core.plan import Plan, entry_of
from hasten.data.prepared import PreparedData
from hasten.errors import InputError
from hasten.machine import environment
from hasten.machine.cache import key_of, source_digest
from hasten.machine.environment import World
from hasten.machine.locks import alone_in, one_measurement
from hasten.measure.ablation import AGAIN, Design, Kind, check_turns
from hasten.measure.energy import EnergyMeter, meter_of_run
from hasten.measure.experiment import Measured, experiment_context, measure_variants
from hasten.measure.record import ExperimentRecord
from hasten.measure.workers import WorkerPool, WorkerSpec
from hasten.progress import Audience
from hasten.recipe.build import plan_of, prepare_run
from hasten.recipe.candidates import candidates, expected_gain, first_plan
from hasten.recipe.schema import Recipe, load_recipe

ENDLESS = 1_000_000  # steps: a search ends by its budget
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # decide the speed, and stand in no recipe


@dataclass(frozen=True)
class ExperimentSubject:
    """A recipe with prepared data, and its context.

    ``job`` is the worker's training job: a name of this package, or ``module:function``.
    """

    recipe: Recipe
    context: JobContext
    plan: Plan
    data_key: str
    meter: EnergyMeter = field(default_factory=lambda: EnergyMeter("not measured"))
    data: PreparedData | None = None
    job: str = "recipe"

    def environment(self, plan: Plan) -> dict[str, str]:
        """Environment variables of a variant's process, the same as those of a training.

        The techniques set theirs first, then the recipe's transport settings.
        """
        return {**plan.environment(self.context), **self.recipe.transport}


def conditions(context: JobContext) -> dict[str, Any]:
    """Machine, versions and sources, for the keys of stored results."""
    return {
        "hardware": {**asdict(context.hardware), "device": context.device},
        "versions": dict(context.versions),
        "source": source_digest(),
    }


def recipe_worker(
    subject: ExperimentSubject,
    recipe: Path,
    plan: Plan,
    changes: Mapping[str, Any] | None = None,
) -> WorkerSpec:
    """The worker of the subject under a plan.

    Args:
        subject: the recipe and what is known of it.
        recipe: the file that the worker reads, a copy of the recipe with another end.
        plan: the techniques.
        changes: of the recipe's keys, see `hasten.measure.worker.recipe_job`.
    """
    arguments = {"recipe": str(recipe), "plan": plan.to_list(), "changes": dict(changes or {})}
    return WorkerSpec(subject.job, arguments, subject.environment(plan), subject.recipe.nproc)


def prepared(
    recipe: Recipe | str | Path, audience: Audience, ranks: bool = False
) -> ExperimentSubject:
    """The recipe with its data ready, and what is known; ``ranks``: its variants may have several.

    Raises:
        InputError: an unusable recipe, or several ranks where there may be one alone.
    """
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe))
    if recipe.nproc > 1 and not ranks:
        raise InputError("nproc: only jobs of one process are measured here; set nproc: 1")
    if environment.world().size > 1:
        raise InputError(
            "several ranks have been started by a launcher, and an experiment starts its own: run "
            "the command once, and set nproc: N in the recipe"
        )

    def tokenising(done: int, total: int) -> None:
        audience.show(f"tokenising {done:,}/{total:,} examples", done / max(total, 1))

    prepared_run = prepare_run(recipe, audience.tell, tokenising, recipe.nproc)
    plan, data = prepared_run.plan, prepared_run.data
    context = replace(prepared_run.context, world=World(size=recipe.nproc))
    if recipe.auto_plan is not None:
        tried = candidates(recipe, context, recipe.auto_plan.fidelity)
        plan = first_plan(tried, plan, context)
        recipe = recipe.model_copy(update={"plan": [entry_of(t) for t in plan], "auto_plan": None})
        audience.tell(f"plan: auto: the techniques in question are {plan}")
    # What ranks have without a technique the baseline has, too: it is no switch.
    usual = plan_of(recipe.model_copy(update={"plan": []}), context)
    switches = Plan(t for t in plan if t not in usual.techniques)
    return ExperimentSubject(recipe, context, switches, data.note.key, meter_of_run(context), data)


@contextlib.contextmanager
def search_workers(subject: ExperimentSubject, folder: Path) -> Iterator[WorkerPool]:
    """Yields workers for a search; their recipe has no last step."""
    recipe, path = subject.recipe, folder / "recipe.yaml"
    endless = {"max_steps": ENDLESS, "epochs": None, "max_tokens": None}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(recipe.model_copy(update=endless).to_yaml())
    with WorkerPool(folder, subject.context.device, recipe.nproc == 1, path) as pool:
        yield pool


def compare_plans(
    subject: ExperimentSubject,
    plans: Mapping[str, Plan],
    design: Design,
    pool: WorkerPool,
    path: Path,
    **more: Any,
) -> Measured:
    """Measures plans in turns, with workers of a pool; the first plan is the baseline.

    Args:
        subject: the recipe.
        plans: the variants by name.
        design: settings of the comparison.
        pool: starts the workers.
        path: the recipe that they read.
        more: further arguments of `hasten.measure.experiment.measure_variants`.
    """

    def spec(name: str) -> WorkerSpec:
        return recipe_worker(subject, path, plans[name])

    kinds: dict[str, Kind] = {next(iter(plans)): "baseline", AGAIN: "again"}
    more.setdefault("kinds", {name: kinds.get(name, "other") for name in plans})
    context = experiment_context(pool, spec, subject.recipe.nproc, subject.meter)
    return measure_variants(context, plans, design, **more)


def measured(
    subject: ExperimentSubject,
    plans: Mapping[str, Plan],
    kinds: Mapping[str, Kind],
    design: Design,
    fresh: bool,
    audience: Audience,
    pool: WorkerPool | None = None,
    began: float | None = None,
) -> Measured:
    """The experiment, from its record as far as that goes, with workers of a pool.

    A budget counts from ``began`` (`time.monotonic`), or from the call: so the data's preparation
    and waiting for another measurement on this machine are within it. With a budget, variants are
    forked: on a busy machine imports alone may take longer than all steps. Variants for which there
    is no time are those with the lowest forecasts.
    """
    recipe, context = subject.recipe, subject.context
    if recipe.nproc > 1:
        check_turns(plans, design.steps)
    steps = {"max_steps": design.steps_in_all, "epochs": None, "max_tokens": None}
    resolved = recipe.model_copy(update=steps)
    decisive = {
        "recipe": resolved.model_dump(mode="json", exclude={"price", "plan", "output"}),
        "data": subject.data_key,
        "plans": {name: plan.key for name, plan in plans.items()},
        "design": asdict(design),
        "threads": {name: environment.variable(name) for name in THREADS},
        **conditions(context),
    }
    key = key_of(decisive)
    folder = Path(recipe.output) / "experiments" / key
    since, seconds_left = None, design.budget_seconds
    if seconds_left is not None:
        now = time.monotonic()
        since = now if began is None else began
        seconds_left = max(seconds_left - (now - since), 0.0)
    with alone_in(folder, audience.tell), one_measurement(audience.tell, seconds_left):
        if fresh:
            (folder / "record.jsonl").unlink(missing_ok=True)
        path = folder / "recipe.yaml"
        path.write_text(resolved.to_yaml())
        with ExperimentRecord(folder / "record.jsonl", key, since) as record:
            if record.done:
                audience.tell(f"measured before: {folder} (--fresh measures again)")
            elif record.events:
                audience.tell(f"going on with {folder}; variants train again from their seed")
            audience.begin()
            forks = design.budget_seconds is not None
            new_pool = WorkerPool(folder, context.device, forks, path)  # starts nothing by itself
            with new_pool if pool is None else contextlib.nullcontext(pool) as workers:
                forecasts = {
                    name: sum(expected_gain(t, context) for t in plan)
                    for name, plan in plans.items()
                }
                return compare_plans(
                    subject,
                    plans,
                    design,
                    workers,
                    path,
                    tell=audience.show,
                    kinds=kinds,
                    expected=forecasts,
                    record=record,
                )
