"""``hasten estimate``: layout, time and cost of a job on a cluster, without the cluster."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
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
from hasten.errors import InputError
from hasten.formatting import wrapped
from hasten.machine.files import write_result

if TYPE_CHECKING:
    from hasten.planner.planning import ClusterPlan
    from hasten.recipe.price import Price


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
    host_memory: Annotated[
        float | None, typer.Option(help="GB of a node's own memory; default: 2000 for dgx")
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
    lossy: Lossy = False,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="a run of twenty steps on this machine, to fit to it, repeatable"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=50, help="layouts to show")] = 5,
    output: Annotated[Path | None, output_option("an HTML page")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate layout, time and cost on a cluster."""
    from hasten.models.architecture import Architecture
    from hasten.planner import text
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
    from hasten.planner.planning import LayoutSpace
    from hasten.planner.planning import plan as search

    writable("--output", output)
    if model is None:
        raise InputError("name a recipe, a preset, or a config.json: hasten estimate MODEL")
    folders, formats = calibrate or [], named(precision)
    devices = cluster, gpu, nodes, gpus_per_node, memory, host_memory
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
        say(predicted_and_measured(Path(model), machines, calibration_of(machines, folders)))
        return
    recipe = recipe_of(model, overrides or [])
    architecture = Architecture.from_config(recipe.model if recipe else model)
    machines = cluster_of(*devices)
    sizes = task, sequence, global_batch, tokens
    job, assumed = job_of(recipe, machines.devices, *sizes, formats)
    paid = price_from(price) or (recipe.price if recipe else None)
    calibration = calibration_of(machines, folders)
    began = time.perf_counter()
    cluster_plan = search(
        *(architecture, machines, job),
        space=LayoutSpace(tuple(formats), lossy),
        top=top,
        calibration=calibration,
    )
    seconds = time.perf_counter() - began
    best = cluster_plan.best
    width = shutil.get_terminal_size((text.WIDTH, 24)).columns
    blocks = [
        text.heading(cluster_plan, seconds, assumed),
        text.layouts_table(best, job, paid, width),
        text.recipes(best),
        text.parts_text(best[0]),
        text.spent(text.spending(best[0], job, paid)),
    ]
    if output is not None:
        write_result(output, text.page(cluster_plan, paid))
    with text_to_stderr(as_json):
        for block in blocks:
            say(wrapped(block, width))
        if output is not None:
            say(f"page: {output}")
    if as_json:
        say(json.dumps(to_dict(cluster_plan, paid), indent=1, allow_nan=False))


def to_dict(cluster_plan: ClusterPlan, price: Price | None) -> dict[str, Any]:
    """Returns the plan as plain values, for files and other programs."""
    from hasten.planner import text
    from hasten.planner.planning import recipe_lines

    job, cluster, model = cluster_plan.job, cluster_plan.cluster, cluster_plan.model
    return {
        "kind": "hasten estimate",
        "model": {"name": model.name, "parameters": model.parameters()}
        | {"active_parameters": model.active_parameters()},
        "cluster": {
            "device": cluster.device.name,
            "nodes": cluster.nodes,
            "per_node": cluster.per_node,
        }
        | {"topology": cluster.topology, "source": cluster.device.source},
        "job": dataclasses.asdict(job),
        "layouts": cluster_plan.layouts,
        "best": [
            {
                **one.to_dict(),
                "recipe": recipe_lines(one),
                "spending": text.spending(one, job, price).to_dict(),
            }
            for one in cluster_plan.best
        ],
        "interval": "P10-P90 of held-out measurements",
        "calibration": text.provenance(cluster_plan),
    }
