"""``hasten launch``: writes the files that start a recipe's job on a cluster."""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.cli.arguments import GpusPerNode, Nodes, Overrides, RecipePath, named, output_option
from hasten.cli.output import say
from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig

if TYPE_CHECKING:
    from hasten.recipe.schema import Recipe

CONTAINER_WORKDIRS = {"kubernetes": "/workspace"}  # default of --workdir; else this folder
BUCKET = "/checkpoints"


def launch(
    path: RecipePath,
    overrides: Overrides = None,
    target: Annotated[
        str, typer.Option(help="torchrun, slurm, kubernetes or skypilot")
    ] = "torchrun",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = 8,
    cluster: Annotated[
        str, typer.Option(help="network of the cluster: as for estimate; selects variables")
    ] = "",
    min_nodes: Annotated[
        int | None, typer.Option(help="smallest number of hosts to continue with; default: all")
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="use spot machines, which may be reclaimed")
    ] = (False),
    output: Annotated[
        Path | None, output_option("folder of the files; default: launch/NAME")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the job; default: that of the recipe")
    ] = None,
    time: Annotated[str | None, typer.Option(help="time limit of the job: 90m, 24h, 7d")] = None,
    grace: Annotated[
        int, typer.Option(help="seconds for saving before machines are reclaimed")
    ] = 300,
    restarts: Annotated[int, typer.Option(help="restarts of failed ranks")] = 3,
    workdir: Annotated[
        str | None, typer.Option(help="base folder of the recipe's relative paths on the nodes")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(help="folder of checkpoints that all nodes share")
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Python interpreter with hasten on the nodes")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="hosts for torchrun", metavar="NAME[,NAME...]")
    ] = None,
    port: Annotated[
        int, typer.Option("--rendezvous-port", help="port on the first host where ranks meet")
    ] = 29500,
    interface: Annotated[str, typer.Option(help="network interface between nodes")] = "",
    partition: Annotated[str, typer.Option(help="Slurm partition")] = "",
    account: Annotated[str, typer.Option(help="Slurm account")] = "",
    qos: Annotated[str, typer.Option(help="Slurm quality of service")] = "",
    constraint: Annotated[str, typer.Option(help="Slurm node features")] = "",
    reservation: Annotated[str, typer.Option(help="Slurm reservation")] = "",
    image: Annotated[str, typer.Option(help="container image (Kubernetes, SkyPilot)")] = "",
    volume: Annotated[str, typer.Option(help="claim with data and checkpoints (Kubernetes)")] = "",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace")] = "",
    rdma: Annotated[str, typer.Option(help="name of the RDMA resource (Kubernetes)")] = "",
    gpu: Annotated[str, typer.Option(help="GPU model: for SkyPilot and for the estimate")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the files, write nothing")
    ] = False,
    submit: Annotated[bool, typer.Option("--submit", help="submit the job")] = False,
) -> int:
    """Write the files that start a recipe on a cluster."""
    from hasten.launch.targets import Launch, files, submission, write
    from hasten.launch.targets.job import advice, name_of
    from hasten.recipe.build import check_batch_of_ranks
    from hasten.recipe.schema import load_recipe
    from hasten.recipe.yaml_reader import read_duration

    if submit and dry_run:
        raise InputError("--submit starts the job, and --dry-run doesn't: give one")
    recipe = load_recipe(path, overrides or [])
    name = name if name is not None else name_of(path.stem)
    folder = (output or Path("launch") / name).absolute()
    names = named(hosts)
    mirrored = target not in ("kubernetes", "skypilot")
    keep = checkpoints or (BUCKET if target == "skypilot" else None)
    leave = str(folder / "leave") if target == "torchrun" and names else None
    topology = cluster or ("single_node" if nodes == 1 else "fat_tree")
    made = Launch(
        recipe=recipe_there(recipe, keep, leave),
        cloud=CloudConfig(nodes, gpus_per_node, topology),
        name=name,
        fewest=min_nodes,
        spot=spot,
        minutes=None if time is None else math.ceil(read_duration(time, "--time") / 60),
        grace=grace,
        restarts=restarts,
        workdir=workdir or CONTAINER_WORKDIRS.get(target, str(Path.cwd())),
        python=python or (sys.executable if mirrored else "python3"),
        port=port,
        hosts=names,
        interface=interface,
        image=image,
        volume=volume,
        accelerator=gpu,
        scheduler_options={
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "reservation": reservation,
            "namespace": namespace,
            "rdma": rdma,
        },
    )
    check_batch_of_ranks(recipe, made.cloud.devices)
    texts = files(target, made, folder)
    if dry_run:
        for file, text in texts.items():
            say(f"--- {file}\n{text}", end="")
        return 0
    command = submission(target, made, folder)
    if submit and not command:
        raise InputError(f"--submit: {target} has to be started by hand on each host")
    if submit and shutil.which(command[0]) is None:
        raise InputError(
            f"--submit: there is no {command[0]} on this machine; leave --submit out and start "
            "the files where there is one"
        )
    for written in write(texts, folder):
        say(f"written: {written}")
    for sentence in advice(made.cloud, made.interface):
        say(f"note: {sentence}")
    by_hand = f"on every host: bash node.sh FIRST_HOST:{made.port}"
    say(f"to start it: {shlex.join(command) if command else by_hand}")
    return subprocess.run(command, check=False).returncode if submit else 0


def recipe_there(recipe: Recipe, checkpoints: str | None, leave_file: str | None) -> str:
    """Returns the recipe's text for the launch; the launcher controls ranks and restarts.

    Every start resumes the previous one. A plan without checkpoints gets dynamic ones, since a
    lost machine would otherwise cost the run.
    """
    from hasten.core.plan import name_of as technique
    from hasten.launch.targets.job import MARK
    from hasten.recipe.schema import recipe_from

    values = recipe.model_dump(mode="json")
    values |= {"nproc": 1, "min_nproc": None, "max_restarts": 0}
    if recipe.resume == "never":
        values["resume"] = "auto"
    if "checkpoints" not in map(technique, recipe.plan):
        values["checkpoint_every"] = "dynamic"
    if checkpoints is not None:
        values["checkpoint_dir"] = checkpoints
    if leave_file is not None and recipe.leave_file is None:
        values["leave_file"] = leave_file
    text = recipe_from(values, "the recipe for the launch").to_yaml()
    return f"{MARK}: the recipe as it runs on the cluster\n{text}"
