"""The options of ``hasten launch``; what they need is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasten.cli.arguments import Overrides, RecipePath


def launch(
    recipe: RecipePath,
    overrides: Overrides = None,
    target: Annotated[
        str, typer.Option(help="torchrun, slurm, kubernetes, megatron or skypilot")
    ] = "torchrun",
    nodes: Annotated[int, typer.Option(help="hosts")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="devices in each, a rank for each")] = 8,
    topology: Annotated[
        str, typer.Option(help="how it is wired, as hasten plan --cluster; decides variables")
    ] = "",
    min_nodes: Annotated[
        int | None, typer.Option(help="go on with so many where some are lost; all if left out")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="on machines that may be taken away")] = (
        False
    ),
    output: Annotated[
        Path | None, typer.Option(help="folder for the files; launch/NAME if left out")
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the job; the recipe's if left out")] = None,
    time: Annotated[str | None, typer.Option(help="the longest it may run: 90m, 24h, 7d")] = None,
    grace: Annotated[int, typer.Option(help="seconds for saving before machines go")] = 300,
    restarts: Annotated[int, typer.Option(help="times that failed ranks are started again")] = 3,
    workdir: Annotated[
        str | None, typer.Option(help="where the recipe's relative paths lie, on the nodes")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="folder of checkpoints that all nodes see")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="interpreter that has hasten, on the nodes")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="for torchrun: the hosts", metavar="NAME[,NAME...]")
    ] = None,
    port: Annotated[int, typer.Option(help="where ranks meet on the first host")] = 29500,
    interface: Annotated[str, typer.Option(help="network interface between nodes")] = "",
    partition: Annotated[str, typer.Option(help="of Slurm")] = "",
    account: Annotated[str, typer.Option(help="of Slurm")] = "",
    qos: Annotated[str, typer.Option(help="of Slurm")] = "",
    constraint: Annotated[str, typer.Option(help="of Slurm")] = "",
    reservation: Annotated[str, typer.Option(help="of Slurm")] = "",
    image: Annotated[str, typer.Option(help="container image (Kubernetes, SkyPilot)")] = "",
    volume: Annotated[str, typer.Option(help="claim with data and checkpoints (Kubernetes)")] = "",
    namespace: Annotated[str, typer.Option(help="of Kubernetes")] = "",
    rdma: Annotated[str, typer.Option(help="resource of RDMA cards (Kubernetes)")] = "",
    gpu: Annotated[str, typer.Option(help="the device's name (SkyPilot; for the plan)")] = "",
    plan: Annotated[
        Path | None, typer.Option(help="a file of hasten plan --json, for Megatron's layout")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print, write nothing")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="start the job as well")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="run the scripts here on a tiny model first")
    ] = False,
    rate: Annotated[
        str | None, typer.Option(help="of the rehearsal's links: 1gbit; scaled if left out")
    ] = None,
) -> None:
    """Write the files that start a recipe on a cluster; nothing is submitted unless asked for."""
    from hasten.cli.launch import LaunchOptions
    from hasten.cli.launch import launch as command

    words = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    words |= {"reservation": reservation, "namespace": namespace, "rdma": rdma}
    asked = LaunchOptions(
        target=target,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        topology=topology,
        fewest=min_nodes,
        spot=spot,
        output=output,
        name=name,
        time=time,
        grace=grace,
        restarts=restarts,
        workdir=workdir,
        checkpoints=checkpoints,
        python=python,
        hosts=tuple(h.strip() for h in (hosts or "").split(",") if h.strip()),
        port=port,
        interface=interface,
        image=image,
        volume=volume,
        gpu=gpu,
        plan=plan,
        words=words,
        rate=rate,
    )
    raise typer.Exit(command(recipe, overrides or [], asked, dry_run, submit, rehearse))
