"""A rehearsal's tiny recipe, its records, and the rate of its links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets.job import MARK
from hasten.machine import host
from hasten.machine.benchmark import core_flops
from hasten.models.presets import PRESETS
from hasten.recipe.schema import Recipe, recipe_from

REACHED = 0.4  # of a device's peak, as a share that training reaches
SLOWEST = 1e6  # bits a second of a rehearsal's link


def scaled_rate(cloud: CloudConfig, gpu: str) -> float | None:
    """A host's link rate for the rehearsal, in bit/s; None if the devices are unknown.

    It is the cluster's rate, divided by the ratio of the device's compute speed to that of
    a local rank. Communication then takes about the same share of a step as on the cluster.
    """
    from hasten.planner.cluster import Cluster

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


TINY = {
    "llama": "deepseek-llm-tiny",
    "qwen2": "r1-distill-qwen-tiny",
    "deepseek_v2": "v2-lite-tiny",
    "deepseek_v3": "v3-tiny",
}


def records() -> str:
    """Records for a rehearsal, as JSONL; every run of a rehearsal has the same."""
    lines = [f"{MARK}: records of a rehearsal"]
    lines += [f"{n} and {n + 1} make {2 * n + 1}. " * (1 + n % 7) for n in range(400)]
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)


def tiny_recipe(recipe: Recipe, ranks: int, output: Path, dataset: Path) -> Recipe:
    """The same plan on a model of the same family that a processor trains in seconds."""
    from hasten.models.load import read_config

    preset = PRESETS.get(recipe.model)
    family = preset.architecture if preset else str(read_config(recipe.model).model_type)
    if family not in TINY:
        raise InputError(f"--rehearse: there is no tiny {family}; there is {', '.join(TINY)}")
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
