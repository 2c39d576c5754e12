"""``hasten profile``: time and memory of a recipe's step."""

from __future__ import annotations

import datetime
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hasten.cli.arguments import (
    AsJson,
    Overrides,
    RecipePath,
    Steps,
    command_line,
    output_option,
)
from hasten.cli.output import say
from hasten.core.plan import Plan

if TYPE_CHECKING:
    from hasten.core.context import JobContext
    from hasten.recipe.build import PreparedJob
    from hasten.recipe.schema import Recipe

WARMUP = 3  # steps; enough for a compiled graph and a prefetcher
SCRATCH = ".profile"  # folder for techniques that write while they train; deleted at the end


def profile(
    path: RecipePath,
    overrides: Overrides = None,
    steps: Steps = 8,
    output: Annotated[Path | None, output_option("folder; default: that of the recipe")] = None,
    as_json: AsJson = False,
) -> int:
    """Show where the time and memory of a step go."""
    from hasten.cli.train import as_ranks, lacking
    from hasten.launch.ranks import process_group, restart_with
    from hasten.machine import environment
    from hasten.measure.profile import steps_needed
    from hasten.progress import Display
    from hasten.recipe.build import prepare_run
    from hasten.recipe.schema import load_recipe
    from hasten.report.profile_page import render_text, write_profile

    changes = [*(overrides or []), *([f"output={output}"] if output is not None else [])]
    options = ["--steps", str(steps), *(["--json"] if as_json else [])]
    length = {"max_steps": steps_needed(WARMUP, steps), "epochs": None, "max_tokens": None}
    recipe = load_recipe(path, changes).model_copy(update=length)
    if recipe.nproc > 1 and environment.world().size == 1:
        return as_ranks(recipe, "profile", options)
    if missing := lacking(recipe):
        restart_with(["profile", str(path), *changes, *options], missing)
    with Display() as display:
        tell = display.tell if environment.world().is_main else lambda text: None
        prepared = prepare_run(recipe, tell)
        job_context, plan = prepared.context, prepared.plan
        display.begin()
        show = display.show if job_context.world.is_main else lambda text, share: None
        with process_group(job_context.world, job_context.device):
            measurements = _measured(prepared, steps, show)
    if job_context.world.is_main:
        measurements = {**_origin(recipe, job_context, plan, path), **measurements}
        page = write_profile(measurements, Path(recipe.output))
        say(
            json.dumps(measurements, indent=1)
            if as_json
            else f"{render_text(measurements)}\n\nprofile: {page}"
        )
    return 0


def _measured(prepared: PreparedJob, steps: int, show: Any) -> dict[str, Any]:
    """Builds and profiles the job inside the process group; only the trace stays on disk."""
    from hasten.core.setup import prepare
    from hasten.core.step import assemble
    from hasten.machine import host
    from hasten.measure.profile import measure
    from hasten.recipe.peak_flops import meter_of

    recipe, context = prepared.recipe, prepared.context
    output = Path(recipe.output)
    scratch = output / SCRATCH
    host.reset_memory_peak(context.device)
    try:
        session = assemble(prepare(prepared.job, prepared.plan, context, scratch))
        session.meter = meter_of(recipe, context, session.model)
        return measure(session, WARMUP, steps, output, show)
    finally:
        if context.world.is_main:
            shutil.rmtree(scratch, ignore_errors=True)


def _origin(recipe: Recipe, context: JobContext, plan: Plan, path: Path) -> dict[str, Any]:
    """Returns job, machine, versions and time of the profile."""
    from hasten.recipe.peak_flops import mfu_words

    return {
        "schema": 1,
        "title": f"Where a step goes: {path.stem}",
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(),
        "plan": plan.to_list(),
        "recipe": recipe.model_dump(mode="json"),
        "hardware": {**asdict(context.hardware), "device": context.device},
        "usable_cores": context.hardware.usable_cores if not context.on_gpu else None,
        "versions": dict(context.versions),
        "world_size": context.world.size,
        "mfu_of": mfu_words(recipe, context),
    }
