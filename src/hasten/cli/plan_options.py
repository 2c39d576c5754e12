"""The options of ``hasten plan``; the command, and numpy with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import Overrides


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a recipe, a preset, a config.json or its folder; or a run that is over",
            metavar="MODEL",
        ),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str, typer.Option(help="how it is wired: dgx_h100, dgx_a100, fat_tree, ethernet ...")
    ] = "single_node",
    gpu: Annotated[
        str, typer.Option(help="the device, or a .json file of its figures or of hasten bench")
    ] = "",
    nodes: Annotated[int, typer.Option(help="hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="devices in each")] = 8,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device, where a file of hasten bench is given")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="pretrain, full or lora; as the recipe says")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens of a sequence")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences of a step")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens in all: 500M, 1B, 14.8T")] = None,
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
    lossy: Annotated[
        bool, typer.Option("--lossy", help="also formats and compression of other mathematics")
    ] = False,
    stack: Annotated[
        str | None, typer.Option(help="software whose measurements were fitted")
    ] = None,
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
    json_out: Annotated[Path | None, typer.Option("--json", help="write the plan here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with drawings here")] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="a file of measurements, to predict each of them")
    ] = None,
) -> None:
    """Say whether a job fits, in which layout, how long it takes and what it costs."""
    from hasten.cli.plan import evaluation
    from hasten.cli.plan import plan as command
    from hasten.planner.inputs import PlanOptions

    if evaluate is not None:
        evaluation(evaluate, json_out)
        return
    wishes = PlanOptions(
        cluster=cluster,
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        memory=memory,
        task=task,
        sequence=sequence,
        global_batch=global_batch,
        tokens=tokens,
        price=price,
        precision=precision,
        schedules=schedules,
        lossy=lossy,
        stack=stack,
        calibrate=calibrate or [],
        top=top,
        why=why or [],
        what_if=what_if or [],
        gpus=gpus,
        shapes=shapes,
        measured=measured,
    )
    command(model, overrides or [], wishes, json_out, html)
