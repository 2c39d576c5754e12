"""``hasten estimate``: layout, time and cost of a job on a cluster, without the cluster."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hasten.cli.arguments import (
    AsJson,
    GpusPerNode,
    Lossy,
    Nodes,
    Overrides,
    named,
    output_option,
    text_to_stderr,
    writable,
)
from hasten.cli.output import say
from hasten.core.plan import name_of
from hasten.errors import InputError
from hasten.formatting import aligned, wrapped
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.planner.candidate import PlanCandidate
    from hasten.planner.layout import PlannedJob
    from hasten.planner.planning import ClusterPlan
    from hasten.recipe.price import Price
    from hasten.recipe.schema import Recipe  # loads torch, as recipes and techniques do

MOST_RANKS = 8  # that are traced
USUAL = ["packed", "document_attention", "fused_layers", "labelled_token_loss"]  # of plan: auto
NEAREST = 5  # rejected layouts that are shown
LISTED = 60  # and that the file lists


def estimate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a recipe, a preset, a hub name, a config.json or its folder; or a finished run",
            metavar="MODEL",
        ),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str, typer.Option(help="network of the cluster: dgx_h100, dgx_a100, fat_tree, ethernet ...")
    ] = "single_node",
    gpu: Annotated[
        str,
        typer.Option(help="GPU model: h100, or a .json file of its figures or of env --bench"),
    ] = "",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = 8,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device, if --gpu is a file of env --bench")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="pretrain, full or lora; default: that of the recipe")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens of a sequence")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences of a step")] = None,
    tokens: Annotated[
        str | None, typer.Option(help="training tokens: 500M, 1B, 14.8T in total")
    ] = None,
    price: Annotated[
        Path | None, typer.Option(help="YAML with currency and per_device_hour")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="formats to look at: bf16,fp8", metavar="NAME[,NAME...]")
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(help="pipeline schedules your software has", metavar="NAME[,NAME...]"),
    ] = None,
    lossy: Lossy = False,
    stack: Annotated[str | None, typer.Option(help="software with fitted measurements")] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="a run of twenty steps on this machine, to fit to it, repeatable"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=50, help="layouts to show")] = 5,
    why: Annotated[
        list[str] | None,
        typer.Option(help="why not this layout, repeatable", metavar="tp=8,pp=2"),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="gpu=a100, nodes=8, network=25 or 2x, repeatable", metavar="KEY=VALUE"),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="compare all known devices")] = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="shapes of the same size that train faster")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(help="a run's folder, to set its parts against the plan's")
    ] = None,
    check_simulation: Annotated[
        bool,
        typer.Option(
            "--check-simulation", help="count the layouts' memory on a simulated GPU (minutes)"
        ),
    ] = False,
    output: Annotated[Path | None, output_option("an HTML page with drawings")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate layout, time and cost on a cluster."""
    from hasten.measure.gpu_simulation.roofline import simulated_device
    from hasten.models.architecture import Architecture
    from hasten.planner import advice, text
    from hasten.planner.candidate import beyond_trainer, recipe_lines, spending
    from hasten.planner.inputs import (
        calibration_of,
        cluster_of,
        is_run,
        job_of,
        machine_of,
        predicted_and_measured,
        price_from,
        recipe_of,
    )
    from hasten.planner.layout import LayoutSpace
    from hasten.planner.planning import plan as search

    writable("--output", output)
    if model is None:
        raise InputError("name a recipe, a preset, or a config.json: hasten estimate MODEL")
    folders, formats = calibrate or [], named(precision)
    devices = cluster, gpu, nodes, gpus_per_node, memory
    if is_run(model):
        for option, differs in (("--json", as_json), ("--output", output is not None)):
            if differs:
                raise InputError(
                    f"{option}: {model} is a finished run; its estimate is a table only"
                )
        if overrides:
            raise InputError(
                f"{overrides[0]!r} changes a recipe, and {model} is a run that is over"
            )
        machines = cluster_of(*devices) if gpu else machine_of(Path(model))
        fitted = calibration_of(machines, folders, stack)
        say(predicted_and_measured(Path(model), machines, *fitted))
        return
    recipe = recipe_of(model, overrides or [])
    if check_simulation and recipe is None:
        raise InputError("--check-simulation counts layouts of a recipe, and a model alone is none")
    architecture = Architecture.from_config(recipe.model if recipe else model)
    machines = cluster_of(*devices)
    if check_simulation:
        simulated_device(machines.device.name)  # refuses what can't be counted
    sizes = task, sequence, global_batch, tokens
    job, assumed = job_of(recipe, machines.devices, *sizes, formats)
    paid = price_from(price) or (recipe.price if recipe else None)
    fitted = calibration_of(machines, folders, stack)
    space = LayoutSpace.everything(machines) if lossy else LayoutSpace()
    space = dataclasses.replace(
        space,
        precisions=formats or space.precisions,
        schedules=named(schedules) or space.schedules,
    )
    began = time.perf_counter()
    cluster_plan = search(
        *(architecture, machines, job),
        space=space,
        top=top,
        calibration=fitted[0],
        stack=fitted[1],
    )
    seconds = time.perf_counter() - began
    best = cluster_plan.best[0]
    changes = [*advice.sensitivity(cluster_plan), *advice.switches(cluster_plan)]
    nearest = advice.rejected(cluster_plan, NEAREST)
    width = shutil.get_terminal_size((text.WIDTH, 24)).columns
    blocks = [
        text.heading(cluster_plan, seconds, assumed),
        text.layouts_table(cluster_plan.best, job, paid, width),
        text.waterfalls(best),
        text.spent(spending(best, job, paid), best),
        text.front(cluster_plan.pareto, job, paid, width),
        text.rejections(nearest, advice.refusals(cluster_plan)),
        text.changes_table(changes, width),
        beyond_trainer(best.layout) or f"in a recipe:\n{indent(recipe_lines(best.layout), '  ')}",
    ]
    if check_simulation:
        blocks.append(f"\n{simulated_counted(cluster_plan, recipe)}")
    blocks += [f"\n{why_text(cluster_plan, layout)}" for layout in why or ()]
    for change in what_if or ():
        other = advice.what_if(cluster_plan, change)
        blocks.append(f"\n{text.what_if_text(change, cluster_plan, other)}")
    if gpus:
        blocks.append(f"\n{text.devices_table(advice.devices(cluster_plan), job)}")
    if shapes:
        blocks.append(f"\n{text.shapes_text(advice.shape_advice(cluster_plan), architecture)}")
    if measured is not None:  # a finished run as it ran, next to what it measured
        blocks.append(f"\n{predicted_and_measured(measured, machines, *fitted)}")
    if output is not None:
        write_result(output, text.page(cluster_plan, paid, nearest, changes))
    with text_to_stderr(as_json):
        for block in blocks:
            say(wrapped(block, width))
        if output is not None:
            say(f"page: {output}")
    if as_json:
        say(json.dumps(to_dict(cluster_plan, paid), indent=1, allow_nan=False))


def why_text(cluster_plan: ClusterPlan, assignments: str) -> str:
    """The answer to ``--why``."""
    from hasten.planner import advice, text

    layout = advice.read_layout([assignments], cluster_plan.best[0].layout)
    possible = not advice.impossibilities(
        cluster_plan.model, cluster_plan.cluster, cluster_plan.job, layout
    )
    one = cluster_plan.simulated(cluster_plan.closed_form(layout)) if possible else None
    return text.why_text(layout, advice.why_not(cluster_plan, layout), one)


def simulated_counted(cluster_plan: ClusterPlan, recipe: Recipe | None) -> str:
    """The best layouts' memory as their steps are counted by simulation, next to what is
    predicted.
    """
    from hasten.measure.gpu_simulation.request import traces
    from hasten.planner.candidate import layout_text as layout_words

    assert recipe is not None
    traceable = [one for one in cluster_plan.best if not untraceable(one)]
    recipes = [recipe_with(recipe, one, cluster_plan.job) for one in traceable]
    counted = iter(traces(recipes, cluster_plan.cluster.device.name))
    rows = [["", "layout", "predicted GB", "by simulation GB", ""]]
    first = None
    for rank_number, one in enumerate(cluster_plan.best, start=1):
        why, peak = untraceable(one), ""
        trace = None if why else next(counted)
        if isinstance(trace, InputError):
            why = str(trace)
        elif trace is not None:
            peak_bytes = max(r.peak_bytes for r in trace.ranks) + one.memory_parts["overhead"]
            fits = peak_bytes <= cluster_plan.cluster.device.memory_bytes
            why, peak = "fits" if fits else "doesn't fit", f"{peak_bytes / 1e9:.1f}"
            first = rank_number if fits and first is None else first
        predicted = one.memory_bytes
        low, middle, high = (b / 1e9 for b in (predicted.low, predicted.middle, predicted.high))
        span = f"{middle:.1f} [{low:.1f}, {high:.1f}]"
        rows.append([str(rank_number), layout_words(one.layout), span, peak, why])
    taken = f"take layout {first}" if first else "none of them was seen to fit"
    return (
        f"memory of the fullest rank, counted by simulation without a GPU, what the driver takes "
        f"included\n{aligned(rows)}\n{taken}"
    )


def untraceable(one: PlanCandidate) -> str:
    """Why a layout can't be counted by simulation; empty where it can."""
    from hasten.planner.candidate import beyond_trainer

    if one.cluster.nodes > 1 or one.devices > MOST_RANKS:
        return f"not counted: more than one node of {MOST_RANKS}"
    return "not counted: not for hasten's own trainer" if beyond_trainer(one.layout) else ""


def recipe_with(recipe: Recipe, one: PlanCandidate, job: PlannedJob) -> Recipe:
    """The recipe in a layout: its techniques take the places of those that do the same."""
    import yaml

    from hasten.planner.candidate import recipe_lines
    from hasten.recipe.schema import recipe_from

    layout_recipe = yaml.safe_load(recipe_lines(one.layout)) or {}
    slots = {_slot(entry) for entry in layout_recipe.get("plan", [])}
    entries = recipe.plan if recipe.auto_plan is None else USUAL
    values = {
        **recipe.model_dump(mode="json"),
        "plan": [e for e in entries if _slot(e) not in slots] + layout_recipe.get("plan", []),
        "layout": layout_recipe.get("layout"),
        "auto_plan": None,
        "nproc": one.devices,
        "cutoff_len": job.sequence,
        "global_batch_size": job.global_batch,
        "global_batch_tokens": None,
    }
    return recipe_from(values, "the layout")


def _slot(entry: Any) -> Any:
    from hasten.recipe.shorthands import catalogue

    name = name_of(entry)
    return next((kind.slot for kind in catalogue() if kind.name() == name), name)


def to_dict(cluster_plan: ClusterPlan, price: Price | None) -> dict[str, Any]:
    """The plan as plain values, for files and other programs."""
    from hasten.planner import advice, text
    from hasten.planner.candidate import spending

    job = cluster_plan.job

    def entry(one: Any) -> dict[str, Any]:
        return {**one.to_dict(), "spending": spending(one, job, price).to_dict()}

    cluster = cluster_plan.cluster
    return {
        "kind": "hasten estimate",
        "model": {"name": cluster_plan.model.name, "parameters": cluster_plan.model.parameters()}
        | {"active_parameters": cluster_plan.model.active_parameters()},
        "cluster": {
            "device": cluster.device.name,
            "nodes": cluster.nodes,
            "per_node": cluster.per_node,
        }
        | {"topology": cluster.topology, "source": cluster.device.source},
        "job": dataclasses.asdict(job),
        "layouts": cluster_plan.layouts,
        "best": [entry(one) for one in cluster_plan.best],
        "pareto": [entry(one) for one in cluster_plan.pareto],
        "rejected": [
            {"layout": dataclasses.asdict(r.layout), "reason": r.reason, "fits": r.fits}
            for r in advice.rejected(cluster_plan, LISTED)
        ],
        "refused": advice.refusals(cluster_plan),
        "interval": "P10-P90 of held-out measurements",
        "calibration": text.provenance(cluster_plan),
    }
