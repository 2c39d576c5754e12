"""A rehearsal: the launch's scripts, hosts, agents and ranks here, with a tiny model.

Everything runs on this machine. Each host is one of a lab. Its links are slower than
the cluster's, by the same factor as this machine is slower than the cluster's devices.
The file ``node.sh`` is the one that the cluster would run. The result shows if the job
starts, meets, trains, saves and ends. It doesn't show how fast the cluster will be.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hasten.cli.launch import recipe_there
from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets import node, write
from hasten.launch.targets.job import MARK, Launch
from hasten.machine import host
from hasten.models.load import read_config
from hasten.models.presets import PRESETS
from hasten.planner.cluster import Cluster
from hasten.recipe.schema import Recipe, load_recipe, recipe_from
from netlab.lab import Lab, Result

ADDRESS = {"user": "10.77.0.N", "root": "10.77.0.N", "loopback": "127.0.0.1"}
MOST_RANKS = 32
# The name of a lab's host says nothing of its address, so the first is told that it is.
AGENT = (
    "unset HASTEN_RENDEZVOUS; export HASTEN_FIRST=$((RANK == 0)); "
    'HASTEN_ADDRESS=${2/%N/$((RANK + 1))} exec bash "$0" "$1"'
)
RANK_BYTES = 0.6e9  # torch, transformers and a tiny model


@dataclass(frozen=True)
class Rehearsed:
    """How it went: each host's end, and the summary that the run left (none: it failed)."""

    mode: str
    results: tuple[Result, ...]
    sent: tuple[int, ...]  # bytes by each host; empty on plain loopback processes
    summary: dict[str, Any] | None

    @property
    def worked(self) -> bool:
        return self.summary is not None and all(r.code == 0 for r in self.results)


def check_size(ranks: int, free_bytes: float) -> None:
    """Raise InputError where so many ranks don't go onto this machine."""
    room = int(free_bytes // RANK_BYTES)
    if ranks > min(MOST_RANKS, room):
        raise InputError(
            f"{ranks} ranks are too many for this machine ({min(MOST_RANKS, room)} "
            "go); rehearse with fewer --nodes or --gpus-per-node, the scripts are the same"
        )


def rehearse(
    launch: Launch,
    folder: Path,
    output: Path,
    rate: str | float | None = None,
    seconds: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Rehearsed:
    """Run it in a lab; ``launch.recipe`` is that of the tiny model, which writes to ``output``.

    Args:
        launch: as for the target ``torchrun``.
        folder: where the scripts are written; they may replace only hasten's own.
        output: the run's folder, absolute.
        rate: of each host's link, each way; None: no limit.
        seconds: the longest it may take.
    """
    write(node.files(launch), folder)
    with Lab(hosts=launch.cloud.nodes, ranks=1, rate=rate) as lab:
        limit = rate if isinstance(rate, str) else f"{(rate or 0) / 1e6:,.0f} Mbit/s"
        tell(f"lab: {lab.hosts} hosts ({lab.mode}), links {limit if rate else 'none'}")
        address = ADDRESS[lab.mode]
        head = f"{address.replace('N', '1')}:{launch.port}"
        # The lab's own ranks are the agents here: theirs isn't the place where the ranks meet.
        command = ["bash", "-c", AGENT, str(folder / "node.sh"), head, address]
        results = lab.run(command, seconds=seconds)
        loops = lab.mode == "loopback"
        sent = () if loops else tuple(lab.bytes(host)[0] for host in range(lab.hosts))
    return Rehearsed(lab.mode, tuple(results), sent, _summary(output))


def _summary(output: Path) -> dict[str, Any] | None:
    try:
        summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


# The rate of its links, its recipe and its examples.

REACHED = 0.4  # of a device's peak, as a share that training reaches
SLOWEST = 1e6  # bits a second of a rehearsal's link
TINY = {
    "llama": "deepseek-llm-tiny",
    "qwen2": "r1-distill-qwen-tiny",
    "deepseek_v2": "v2-lite-tiny",
    "deepseek_v3": "v3-tiny",
}


def scaled_rate(cloud: CloudConfig, gpu: str) -> float | None:
    """A host's link rate, in bit/s; None if the devices are unknown.

    It is the cluster's rate, divided by the ratio of the device's compute speed to that of
    a local rank. Communication then takes about the same share of a step as on the cluster.
    """
    if cloud.nodes == 1:
        return None
    try:
        cluster = Cluster.of(cloud, gpu)
    except InputError:
        if gpu:
            raise
        return None
    node = 8 * cluster.inter * cloud.gpus_per_node
    cores = max(1, host.usable_cores())
    host_flops = core_flops() * min(1.0, cores / cloud.devices)
    return max(SLOWEST, node * host_flops / (REACHED * cluster.device.peak16))


def core_flops() -> float:
    """FLOP/s of one core in float32, from a matrix product of some milliseconds."""
    threads, side = torch.get_num_threads(), 512
    left, right = torch.rand(side, side), torch.rand(side, side)
    torch.set_num_threads(1)
    spent = []
    try:
        for _ in range(9):
            began = time.perf_counter()
            torch.mm(left, right)
            spent.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return 2 * side**3 / statistics.median(spent)


def records() -> str:
    """Examples as JSONL, the same for every rehearsal."""
    lines = [f"{MARK}: records of a rehearsal"]
    lines += [f"{n} and {n + 1} make {2 * n + 1}. " * (1 + n % 7) for n in range(400)]
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)


def tiny_recipe(recipe: Recipe, ranks: int, output: Path, dataset: Path) -> Recipe:
    """The same plan on a model of the same family that a processor trains in seconds."""
    preset = PRESETS.get(recipe.model)
    family = preset.architecture if preset else str(read_config(recipe.model).model_type)
    if family not in TINY:
        raise InputError(f"there is no tiny {family}; there is {', '.join(TINY)}")
    values: dict[str, Any] = recipe.model_dump(mode="json")
    values |= {
        "model": TINY[family],
        "tokenizer": None,
        "dataset": str(dataset),
        "columns": {},
        "chat_template": "auto",
        "eval_data": 4,
        "max_examples": 64 + 8 * ranks,
        "cutoff_len": 128,
        "vocabulary": 512,
        "max_steps": 3,
        "epochs": None,
        "max_tokens": None,
        "global_batch_size": 2 * ranks,
        "global_batch_tokens": None,
        "warmup_steps": 0,
        "eval_every": 0,
        "patience": 0,
        "price": None,
        "device": "cpu",
        "output": str(output),
        "on_obstacle": "skip",
        "require_effect": False,
        "resume": "never",
        "leave_file": None,
        "leave_command": None,
        "transport": {},
    }
    return recipe_from(values, "the recipe of the rehearsal")


def rehearsal(path: Path, cloud: CloudConfig, gpu: str, rate: str, folder: Path) -> int:
    """Rehearses the launch of a recipe on such a cluster, prints what happened; the exit code."""
    recipe = load_recipe(path, [])
    check_size(cloud.devices, psutil.virtual_memory().available)
    output = folder / "run"
    tiny = tiny_recipe(recipe, cloud.devices, output, folder / "records.jsonl")
    write({"records.jsonl": records()}, folder)
    launch = Launch(
        recipe_there(tiny, None, None), cloud, workdir=str(Path.cwd()), python=sys.executable
    )
    print(f"rehearsal: {tiny.model} for {recipe.model}, {cloud.devices} ranks, scripts {folder}")
    rehearsed = rehearse(launch, folder, output, rate or scaled_rate(cloud, gpu), tell=print)
    for result in rehearsed.results:
        if result.code != 0 or not rehearsed.worked:
            lines = result.output.strip().splitlines()[-12:]
            print(f"host {result.host} ended with {result.code}:", *lines, sep="\n  ")
    if not rehearsed.worked or rehearsed.summary is None:
        print("the rehearsal failed", file=sys.stderr)
        return 1
    summary = rehearsed.summary
    print(f"{summary['stopped']}: {summary['steps']} steps, {summary['tokens']:,} tokens")
    for number, sent in enumerate(rehearsed.sent):
        print(f"host {number}: {sent:,} bytes sent")
    return 0
