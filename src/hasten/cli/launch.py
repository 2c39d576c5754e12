"""``hasten launch``: a recipe and a cluster become files that start the job there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets import TARGETS, Launch, files, submission, write
from hasten.launch.targets.job import advice, name_of
from hasten.planner.launching import (
    config_of,
    planned,
    recipe_there,
    records,
    scaled_rate,
    tiny_recipe,
)
from hasten.recipe.build import check_batch_of_ranks
from hasten.recipe.schema import Recipe, load_recipe

UNITS = {"m": 1, "h": 60, "d": 1440}
THERE = {"kubernetes": "/workspace"}  # work folders that don't mirror this machine's
BUCKET = "/checkpoints"


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line asks for; see ``options``."""

    target: str
    nodes: int
    gpus_per_node: int
    topology: str
    fewest: int | None
    spot: bool
    output: Path | None
    name: str | None
    time: str | None
    grace: int
    restarts: int
    workdir: str | None
    checkpoints: str | None
    python: str | None
    hosts: tuple[str, ...]
    port: int
    interface: str
    image: str
    volume: str
    gpu: str
    plan: Path | None
    words: Mapping[str, str]
    rate: str | None


def launch(
    path: Path,
    overrides: Sequence[str],
    asked: LaunchOptions,
    dry_run: bool = False,
    submit: bool = False,
    rehearse: bool = False,
) -> int:
    """Write the files, or print them; the exit code."""
    if asked.target not in TARGETS:
        hint = did_you_mean(asked.target, TARGETS)
        raise InputError(f"--target {asked.target!r}{hint}: it is one of {', '.join(TARGETS)}")
    if submit and (dry_run or rehearse):
        raise InputError("--submit starts the job; --dry-run and --rehearse don't: give one")
    recipe = load_recipe(path, overrides)
    name = asked.name if asked.name is not None else name_of(path.stem)
    folder = (asked.output or Path("launch") / name).absolute()
    made = launch_of(recipe, asked, name, folder)
    if rehearse:
        return rehearsal(recipe, asked, made, folder)
    if asked.target != "megatron":  # whose own plan deals a batch out
        check_batch_of_ranks(recipe, cloud_of(asked).devices)
    texts = files(asked.target, made, folder)
    if dry_run:
        for file, text in texts.items():
            print(f"--- {file}\n{text}", end="")
        return 0
    command = submission(asked.target, made, folder)
    if submit:
        _check_submission(asked.target, command)
    for written in write(texts, folder):
        print(f"written: {written}")
    for sentence in advice(made.cloud, made.interface):
        print(f"note: {sentence}")
    print(f"to start it: {shlex.join(command) if command else _by_hand(asked.target, made)}")
    return subprocess.run(command, check=False).returncode if submit else 0


def launch_of(recipe: Recipe, asked: LaunchOptions, name: str, folder: Path) -> Launch:
    """What the options and the recipe say together."""
    target = asked.target
    mirrored = target not in ("kubernetes", "skypilot")
    keep = asked.checkpoints or (BUCKET if target == "skypilot" else None)
    leave = str(folder / "leave") if target == "torchrun" and asked.hosts else None
    found = Launch(
        recipe=recipe_there(recipe, keep, leave),
        cloud=cloud_of(asked),
        name=name,
        fewest=asked.fewest,
        spot=asked.spot,
        minutes=minutes_of(asked.time),
        grace=asked.grace,
        restarts=asked.restarts,
        workdir=asked.workdir or THERE.get(target, str(Path.cwd())),
        python=asked.python or (sys.executable if mirrored else "python3"),
        port=asked.port,
        hosts=asked.hosts,
        interface=asked.interface,
        image=asked.image,
        volume=asked.volume,
        accelerator=asked.gpu,
        words=asked.words,
    )
    if target != "megatron":
        return found
    layout, batch = planned(recipe, found.cloud, asked.gpu, asked.plan)
    return replace(found, config=config_of(recipe), layout=layout, batch=batch)


def cloud_of(asked: LaunchOptions) -> CloudConfig:
    """The cluster; one host is a single node, several are an RDMA fabric unless it is said."""
    topology = asked.topology or ("single_node" if asked.nodes == 1 else "fat_tree")
    return CloudConfig(asked.nodes, asked.gpus_per_node, topology)


def minutes_of(text: str | None) -> int | None:
    """``90m``, ``24h`` or ``7d`` as minutes."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text.strip())
    if not found:
        raise InputError(f"--time {text!r}: write 90m, 24h or 7d")
    return int(found[1]) * UNITS[found[2]]


def rehearsal(recipe: Recipe, asked: LaunchOptions, made: Launch, folder: Path) -> int:
    """The scripts on this machine with a tiny model of the same family; the exit code."""
    import psutil

    from hasten.launch.targets.rehearsal import Rehearsed, check_size, rehearse

    check_size(made, psutil.virtual_memory().available)
    place = folder / "rehearsal"
    output = place / "run"
    tiny = tiny_recipe(recipe, made.cloud.devices, output, place / "records.jsonl")
    write({"records.jsonl": records()}, place)
    here = replace(made, recipe=recipe_there(tiny, None, None), python=sys.executable)
    rate: Any = asked.rate or scaled_rate(made.cloud, asked.gpu)
    print(
        f"rehearsal: {tiny.model} for {recipe.model}, {made.cloud.devices} ranks, scripts {place}"
    )
    found: Rehearsed = rehearse(
        replace(here, workdir=str(Path.cwd())), place, output, rate, tell=print
    )
    for result in found.results:
        if result.code != 0 or not found.worked:
            words = result.output.strip().splitlines()[-12:]
            print(f"host {result.host} ended with {result.code}:", *words, sep="\n  ")
    if not found.worked or found.summary is None:
        print("the rehearsal failed", file=sys.stderr)
        return 1
    said = found.summary
    print(f"{said['stopped']}: {said['steps']} steps, {said['tokens']:,} tokens")
    for host, sent in enumerate(found.sent):
        print(f"host {host}: {sent:,} bytes sent")
    return 0


def _check_submission(target: str, command: list[str]) -> None:
    if not command:
        raise InputError(f"--submit: {target} has to be started by hand on each host")
    if shutil.which(command[0]) is None:
        raise InputError(
            f"--submit: there is no {command[0]} on this machine; leave --submit out and start "
            "the files where there is one"
        )


def _by_hand(target: str, made: Launch) -> str:
    script = "megatron.sh" if target == "megatron" else "node.sh"
    return f"on every host: bash {script} FIRST_HOST:{made.port}"
