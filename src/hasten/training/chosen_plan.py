"""``plan: auto`` before a training: the choice, its proof, and a check of its speed.

A resumed run continues with its plan. A launcher's ranks can't run a comparison,
because they are the job already. There the first rank decides, from a stored comparison
or from a forecast, and all ranks get the same plan.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hasten.core.context import JobContext
from hasten.core.plan import name_of
from hasten.core.slot import Slot
from hasten.core.timing import StepMetrics
from hasten.machine import host
from hasten.machine.files import write_atomic
from hasten.machine.processes import LoadMeter
from hasten.measure.choice import Choice, ChoiceRow
from hasten.measure.choose import LONGEST_SECONDS, choose, choose_by_forecast
from hasten.measure.quality.requirements import FAILED
from hasten.measure.quality.verification import VerificationDesign, verified
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.parts.checkpoint.format import read_manifest
from hasten.progress import Audience
from hasten.recipe.build import plan_of, requested_plan
from hasten.recipe.prepare import newest_checkpoint
from hasten.recipe.schema import Recipe

CHOICE = "choice.json"
PROOF_SHARE = 0.25  # share of the search's budget for the proof of equal quality, in addition to it
SEEDS = 3  # for the proof of a technique with other mathematics, if those are allowed
WATCHED_STEPS, SLOWER = 50, 0.85  # a run below this share of the measured speed is reported
LITTLE_LOAD = 0.1  # share of the processor: other processes that use less don't explain a slow run
_LOG = logging.getLogger(__name__)


def with_chosen_plan(
    recipe: Recipe, audience: Audience, *, fresh: bool = False
) -> tuple[Recipe, Choice | None]:
    """Returns the recipe with the plan for ``plan: auto``, and the choice, or None.

    The choice is written into the run's folder, so its recipe reproduces the run.

    Args:
        recipe: as it was read.
        audience: receives the progress, and one sentence on the choice.
        fresh: run the comparison again, even if a result is stored.

    Raises:
        InputError: an unusable recipe.
    """
    if recipe.auto_plan is None:
        return recipe, None
    if recipe.resume != "never" and (saved_entries := _of_the_run(recipe)) is not None:
        audience.tell(f"plan: auto: continuing with the plan of {recipe.output}")
        return _with_plan(recipe, saved_entries), None
    prove = partial(_proven, recipe, audience)
    choice = choose(recipe, audience, fresh=fresh, prove=prove)
    audience.tell(choice.sentence)
    folder = Path(recipe.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CHOICE, json.dumps(asdict(choice), indent=1))
    return _with_plan(recipe, choice.entries), choice


def same_on_all_ranks(recipe: Recipe, context: JobContext, tell: Callable[[str], None]) -> Recipe:
    """Returns the recipe with the first rank's choice, in ranks started by a launcher.

    Raises:
        InputError: the choice can't be used on this rank.
    """
    payload: list[Any] = [None]
    if context.world.is_main:
        choice = choose_by_forecast(recipe, context, "a launcher's ranks can't compare plans")
        tell(choice.sentence)
        payload = [choice.entries]
    dist.broadcast_object_list(payload, src=0)
    return _with_plan(recipe, payload[0])


def _with_plan(recipe: Recipe, entries: list[Any]) -> Recipe:
    return recipe.model_copy(update={"plan": entries, "auto_plan": None})


def _of_the_run(recipe: Recipe) -> list[Any] | None:
    """Returns the plan of the checkpoint that the run resumes from, with the recipe's techniques.

    Returns None if there is none, or if it is old.
    """
    requested = requested_plan(recipe)
    path = newest_checkpoint(recipe, requested)
    if path is None:
        return None
    try:
        plan = read_manifest(path)["meta"]["job"]["plan"]
        return recipe.plan + [
            {"technique": name, **entry["settings"]}
            for name, entry in plan.items()
            if Slot[entry["slot"]] not in requested
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _LOG.warning(
            "%s contains no plan (%s), so a plan is chosen again", path, type(error).__name__
        )
        return None


def _proven(
    recipe: Recipe, audience: Audience, choice: Choice, subject: ExperimentSubject
) -> Choice:
    """Returns the choice without techniques that failed their proof of equal quality.

    The speed of the remaining plan wasn't measured.
    """
    settled = _with_plan(recipe, choice.entries)
    subject = replace(subject, recipe=settled, plan=plan_of(settled, subject.context))
    budget = PROOF_SHARE * (recipe.auto_budget or LONGEST_SECONDS)
    lossy = recipe.auto_plan is not None and recipe.auto_plan.fidelity == "lossy"
    design = VerificationDesign(seeds=SEEDS if lossy else 0, budget_seconds=budget)
    report = verified(subject, design, audience.tell, fresh=False)
    wrong = {
        row["technique"]: row["text"] for row in report["verification"] if row["verdict"] in FAILED
    }
    failed_checks = [row["what"] for row in report["invariance"] if row["verdict"] in FAILED]
    untested = [
        row["technique"] for row in report["verification"] if row["verdict"] == "not tested"
    ]
    if not wrong and failed_checks:
        audience.tell(f"plan: auto: a proof of equal quality failed: {'; '.join(failed_checks)}")
    for name, text in wrong.items():
        audience.tell(f"plan: auto: without {name}: its proof of equal quality failed: {text}")
    entries = [entry for entry in choice.entries if name_of(entry) not in wrong]
    proven = [row["technique"] for row in report["verification"] if row["verdict"] == "equal"]
    proof = f"verified, each against a reference on this job: {', '.join(proven) or 'none'}"
    if wrong or failed_checks:
        proof = "a proof of equal quality failed"
    elif untested:
        proof = f"equal quality not tested of {', '.join(untested)}: hasten verify does"
    choice = replace(choice, entries=entries, why=f"{choice.why}; {proof}")
    if not wrong:
        return choice
    failed = "its proof of equal quality failed"
    rows = [row for row in choice.rows if not wrong.keys() & {*row.name.split()}]
    rows += [ChoiceRow(name, "left out", f"{failed}: {text}") for name, text in wrong.items()]
    return replace(choice, rows=rows, gain=None, tokens_per_second=None, next_best=None)


class SpeedWatch:
    """Prints once, after 50 steps, if a run is slower than the measured speed of its plan.

    The first step is left out: it pays for memory, kernels and the optimizer's state. The mean
    over all steps decides, not the median: a few long waits are the usual case.

    Args:
        choice: with the measured speed; without one nothing is printed.
        ``tell``: prints the line.
        load: measures what other processes take of this machine meanwhile.
    """

    def __init__(
        self, choice: Choice, tell: Callable[[str], None], load: LoadMeter | None = None
    ) -> None:
        self._choice, self._tell = choice, tell
        self._load = LoadMeter(host.usable_cores()) if load is None else load
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def note(self, metrics: StepMetrics) -> None:
        """Counts a step that has ended."""
        measured = self._choice.tokens_per_second
        if measured is None or self._steps > WATCHED_STEPS:
            return
        self._load.lap(None if self._steps == 0 else SpeedWatch)
        self._steps += 1
        if self._steps == 1:
            return
        self._tokens += metrics.tokens
        self._seconds += metrics.step_seconds
        rate = self._tokens / self._seconds
        if self._steps <= WATCHED_STEPS or rate >= SLOWER * measured:
            return
        others = self._load.share(SpeedWatch)
        cause = f"other processes used {others:.0%} of the processor meanwhile"
        if others < LITTLE_LOAD:
            cause += ", too little to explain it: look for longer examples, or a lower clock rate"
        other = self._choice.next_best
        names = "" if other is None else f"; next best was {', '.join(map(name_of, other))}"
        self._tell(
            f"plan: auto: {self._steps} steps ran at {rate / measured:.0%} of the speed that was "
            f"measured for their plan ({rate:,.0f} of {measured:,.0f} tokens/s): {cause}{names}"
        )
