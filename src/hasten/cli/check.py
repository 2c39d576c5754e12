"""``hasten check``: checks of a recipe or a DeepSpeed file that need no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hasten.cli.arguments import Overrides
from hasten.cli.output import say
from hasten.core.plan import Plan
from hasten.core.slot import Slot
from hasten.errors import InputError
from hasten.formatting import count_text
from hasten.machine.environment import World

if TYPE_CHECKING:
    from hasten.core.context import JobContext
    from hasten.data.prepared import PreparedData
    from hasten.recipe.schema import Recipe

SHOWN = 3  # files that are printed by name


def check(
    path: Annotated[
        Path | None, typer.Argument(help="the recipe, a YAML file", metavar="RECIPE")
    ] = None,
    overrides: Overrides = None,
    ds_config: Annotated[
        Path | None,
        typer.Option(help="show how each key of a ds_config.json is used", metavar="FILE"),
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="kill, damage and resume the job, then compare")
    ] = False,
) -> int:
    """Check recipe, data, model and plan without training."""
    if ds_config is not None:
        return show_ds_config(ds_config, path, overrides or [])
    if path is None:
        raise InputError("RECIPE is missing; give a recipe, or --ds-config FILE")
    if faults:
        from hasten.training.fault_test import check_faults

        return check_faults(path, overrides or [])
    from hasten.launch import transport
    from hasten.recipe.memory_check import MAY_RUN_OUT
    from hasten.recipe.prepare import check_folder, check_space
    from hasten.recipe.schema import load_recipe

    recipe = load_recipe(path, overrides or [])
    checks = _Checks()
    checks.note("recipe", f"{path} is well formed")
    output = Path(recipe.output)
    checks.passes("output", f"{output} can be written", lambda: check_folder(output))
    _kernels(checks)
    checks.note("transport", transport.shown(recipe.transport))
    prepared_data = checks.run("data", lambda: _prepared_data(recipe))
    if prepared_data is not None:
        _sources(recipe, prepared_data, checks)
    # After the data: a preset's size depends on the tokenizer that is trained on them.
    context = checks.run("model", lambda: _model(recipe, prepared_data))
    if context is not None:
        for note in checks.run("weights", lambda: _weights(recipe)) or ():
            checks.note("weights", note)
        if prepared_data is not None:
            checks.run("built", lambda: _built(recipe, prepared_data))
        _gpu(context, checks)
        for hint in transport.hints(recipe.transport, context.on_gpu):
            checks.note("transport", f"hint: {hint}", "warn")
        checks.passes("disk", "room for the run", lambda: check_space(output, context))
        checks.run("ceiling", lambda: _ceiling(recipe, context))
        plan = _techniques(recipe, context, checks)
        if plan is not None and prepared_data is not None:
            checks.run("batch", lambda: _batch(recipe, prepared_data, context, plan))
            checks.run("memory", lambda: _memory(recipe, prepared_data, context, plan), MAY_RUN_OUT)
    if prepared_data is not None:
        say(f"\n{prepared_data.first_example()}")
    return 2 if checks.failed else 0


Status = Literal["ok", "warn", "FAIL"]


class _Checks:
    """Runs checks one after the other; a failed one doesn't keep the next from running."""

    def __init__(self) -> None:
        self.failed = False

    def note(self, name: str, text: str, status: Status = "ok") -> None:
        say(f"{status:<4} {name:<12} {text}", flush=True)
        self.failed = self.failed or status == "FAIL"

    def run(self, name: str, check: Callable[[], tuple[str, Any]], doubt: str | None = None) -> Any:
        """Returns the check's outcome, or None if it failed; a text with ``doubt`` is a warning."""
        try:
            text, outcome = check()
        except InputError as error:
            self.note(name, str(error), "FAIL")
            return None
        self.note(name, text, "warn" if doubt is not None and doubt in text else "ok")
        return outcome

    def passes(self, name: str, text: str, check: Callable[[], None]) -> None:
        """Notes ``text`` if the check raises no error."""
        try:
            check()
        except InputError as error:
            self.note(name, str(error), "FAIL")
        else:
            self.note(name, text)


def _kernels(checks: _Checks) -> None:
    """Notes which of the processor's kernels run here; without one, PyTorch's operation runs."""
    from hasten.parts.kernels import codec, products, rowwise

    libraries = {
        "rows": rowwise.library(),
        "products": products.library(),
        "codec": codec.library(),
    }
    summary = ", ".join(
        f"{name}: {library.reason or 'compiled'}" for name, library in libraries.items()
    )
    lacking = any(library.reason for library in libraries.values())
    checks.note("kernels", summary, "warn" if lacking else "ok")


def _gpu(context: JobContext, checks: _Checks) -> None:
    """Notes the GPU's kernels, each tried on small inputs; refused ones are tried again."""
    from hasten.machine import host
    from hasten.recipe.gpu_check import check_kernels

    verdicts = check_kernels(
        context, lambda text: checks.note("gpu kernels", text, "warn"), again=True
    )
    good = [name for name, verdict in verdicts.items() if not verdict.fault]
    if good:
        where = host.accelerator_words(context.device)
        checks.note("gpu kernels", f"agree with float64 on {where}: {', '.join(good)}")
    if unsteady := [name for name in good if not verdicts[name].repeats]:
        checks.note("gpu kernels", f"give other bits each time: {', '.join(unsteady)}", "warn")


def _model(recipe: Recipe, prepared_data: PreparedData | None) -> tuple[str, JobContext]:
    from hasten.recipe.build import context_of

    context = context_of(recipe, prepared_data)
    model = context.model
    text = (
        f"{recipe.model}: {model.architecture}, {model.layers} layers, "
        f"{count_text(model.parameters)} parameters, on {context.device}"
    )
    return text, context


def _weights(recipe: Recipe) -> tuple[str, list[str]]:
    from hasten.models.load import stored_folder
    from hasten.recipe.prepare import is_random, weight_notes

    notes = weight_notes(recipe, fetch=False)
    if is_random(recipe):
        return "drawn from the seed", notes
    fetched = stored_folder(recipe.model) is not None
    return "fit the config" if fetched else "not fetched yet: checked when training starts", notes


def _built(recipe: Recipe, prepared_data: PreparedData) -> tuple[str, None]:
    """Builds the model as `hasten train` does, but without memory for its weights."""
    from hasten.models.adapters import adapted_table
    from hasten.recipe.build import Building, lora_of

    model: Any = Building(recipe, prepared_data).skeleton()
    text = f"{type(model).__name__}, attention: {model.config._attn_implementation}"
    if (lora := lora_of(recipe, Plan())) is not None:
        rows = adapted_table(lora.adapt(model))
        kinds = ", ".join(row.modules.rpartition("*.")[2] for row in rows)
        text += f", LoRA on {sum(row.count for row in rows)} modules: {kinds}"
    return text, None


def _prepared_data(recipe: Recipe) -> tuple[str, PreparedData]:
    from hasten.recipe.prepared_data import prepare_data

    prepared_data = prepare_data(recipe, Path(recipe.output) / "data", tell=lambda text: None)
    examples = prepared_data.example_stats
    text = (
        f"{examples.count:,} examples, {examples.tokens:,} tokens, longest {examples.longest:,}, "
        f"{examples.trained_share:.0%} trained, {len(prepared_data.eval_data):,} held out, "
        f"{len(prepared_data.note.rejected)} left out"
    )
    return text, prepared_data


def _sources(recipe: Recipe, prepared_data: PreparedData, checks: _Checks) -> None:
    """Notes the format of each file, and how many examples are longer than the cutoff."""
    from hasten.data.prepared import overlap
    from hasten.recipe.prepared_data import template_advice

    note = prepared_data.note
    files = [f"{file} ({note.containers.get(file, '?')}): {s}" for file, s in note.shapes.items()]
    if files:
        suffix = f", and {len(files) - SHOWN} more files" if len(files) > SHOWN else ""
        checks.note("files", ", ".join(files[:SHOWN]) + suffix)
    advice = overlap(prepared_data).advice
    if advice:
        checks.note("held out", advice, "warn")
    for sentence in template_advice(recipe, prepared_data):
        checks.note("template", sentence, "warn")
    if note.long:
        fate = f"cutoff_len={recipe.cutoff_len} (too_long: {recipe.too_long})"
        checks.note("long", f"{note.long:,} examples are longer than {fate}", "warn")


def _batch(
    recipe: Recipe, prepared_data: PreparedData, context: JobContext, plan: Plan
) -> tuple[str, None]:
    from hasten.recipe.build import batch_of, check_batch_of_ranks, job_of

    examples = prepared_data.example_stats
    ranks = max(recipe.nproc, context.world.size)
    check_batch_of_ranks(recipe, ranks, examples.tokens / max(examples.count, 1))
    job = job_of(recipe, prepared_data, context, plan)
    batch = batch_of(recipe)
    unit = f"{batch.examples} examples" if batch.examples else f"{batch.tokens:,} tokens"
    return f"{unit} a step, {job.schedule.total_steps:,} steps", None


def _memory(
    recipe: Recipe, prepared_data: PreparedData, context: JobContext, plan: Plan
) -> tuple[str, None]:
    """Returns the memory that a rank needs; ranks of one machine share its memory."""
    from hasten.core.setup import prepare
    from hasten.recipe.build import job_of
    from hasten.recipe.memory_check import memory_words
    from hasten.techniques.layout.ddp import DDP

    if recipe.nproc > 1:
        context = replace(context, world=World(size=recipe.nproc))
        plan = plan if Slot.LAYOUT in plan else plan.with_(DDP())
    job = job_of(recipe, prepared_data, context, plan)
    text, _ = memory_words(recipe, prepare(job, plan, context, Path(recipe.output) / "checkpoints"))
    return text, None


def _ceiling(recipe: Recipe, context: JobContext) -> tuple[str, None]:
    from hasten.recipe.peak_flops import ceiling_of

    ceiling = ceiling_of(recipe, context)
    if ceiling is not None:
        return f"MFU of {ceiling.source}", None
    later = recipe.ceiling == "measure"
    return "measured before the first step" if later else "none is known: no MFU", None


def _plan(recipe: Recipe, context: JobContext) -> tuple[str, Plan]:
    from hasten.recipe.build import requested_plan
    from hasten.recipe.candidates import candidates, first_plan

    plan = requested_plan(recipe)
    if recipe.auto_plan is None:
        return str(plan), plan
    plan = first_plan(candidates(recipe, context, recipe.auto_plan.fidelity), plan, context)
    return f"auto, which begins with {plan} (hasten train --choose-only shows its choice)", plan


def _techniques(recipe: Recipe, context: JobContext, checks: _Checks) -> Plan | None:
    """Returns the plan that a run would use; None if a technique can't work."""
    from hasten.machine import environment
    from hasten.recipe.build import skip_sentence

    plan: Plan | None = checks.run("plan", lambda: _plan(recipe, context))
    usable, alone = plan, recipe.nproc == 1 and environment.world().size == 1
    for technique in plan or ():
        reasons = technique.unsupported_reasons(context)
        skipped = skip_sentence(recipe, technique, context)
        description = skipped or "; ".join(reasons)
        is_layout = technique.slot is Slot.LAYOUT and not getattr(technique, "offload", False)
        if not description and is_layout and alone:
            description = (
                "one rank holds everything, so it changes nothing: give nproc, or start with "
                "torchrun"
            )
        status: Status = "FAIL" if reasons and not skipped else "warn" if description else "ok"
        checks.note(technique.name(), description or f"{technique.slot.value}: no obstacle", status)
        if reasons and usable is not None:
            usable = usable.without(technique) if skipped else None
    return usable


def show_ds_config(file: Path, recipe: Path | None, overrides: Sequence[str]) -> int:
    """Prints a line for each key, and the recipe that results; returns 2 if a key is refused."""
    from hasten.parts.distributed.deepspeed_config import HONOURED, IGNORED, REFUSED
    from hasten.recipe.preset_plans import entries_of
    from hasten.recipe.shorthands import meaning_of, settings_of, techniques_of, world_of
    from hasten.recipe.yaml_reader import read_overrides, read_yaml_file

    values: dict[str, Any] = read_yaml_file(recipe, "recipe") if recipe else {}
    if not isinstance(values, dict):
        raise InputError(f"{recipe} is not a recipe: it must be lines of `key: value`")
    values |= read_overrides(overrides)
    try:
        plan = entries_of(values.get("plan") or [])
        meaning = meaning_of(file, values, plan)
    except ValueError as error:
        raise InputError(str(error)) from error
    width = max((len(row.key) for row in meaning.rows), default=0)
    for fate in (HONOURED, IGNORED, REFUSED):
        for row in meaning.rows:
            if row.fate == fate:
                say(f"{fate:<9} {row.key:<{width}}  {row.explanation}")
    ranks = world_of(values)
    say(f"\nto a recipe, for {ranks} rank(s):")
    if ranks == 1:
        say("  one rank: ZeRO has nothing to shard, whatever its stage; give nproc=N for several")
    for name, setting in settings_of(meaning).items():
        say(f"  {name}: {setting}")
    for entry in techniques_of(meaning, values):
        say(f"  plan: {entry}")
    if not meaning.refused:
        say(f"in a recipe, `deepspeed: {file}` uses this; deep_speed in its plan runs DeepSpeed")
    return 2 if meaning.refused else 0
