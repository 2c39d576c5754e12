"""Inputs of a launch from the plan: Megatron-LM's layout, recipe, rehearsal's links."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hasten.core.job import share_of
from hasten.core.plan import name_of
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets.job import MARK
from hasten.launch.targets.megatron import arguments
from hasten.machine import host
from hasten.machine.benchmark import core_flops
from hasten.models.presets import PRESETS
from hasten.planner.layout import PlannedJob, PlannedLayout
from hasten.recipe.schema import Recipe, recipe_from

TRIED = 50  # layouts, best first, until Megatron-LM can run one
REACHED = 0.4  # of a device's peak, as a share that training reaches
Planned = TypeVar("Planned", PlannedJob, PlannedLayout)
SLOWEST = 1e6  # bits a second of a rehearsal's link


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of the model's config."""
    from hasten.models.load import read_config

    config_fields: dict[str, Any] = read_config(recipe.model).to_dict()
    return config_fields


def planned(
    recipe: Recipe, cloud: CloudConfig, gpu: str, file: Path | None
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Layout and batch: of the plan's file, or the best that Megatron-LM can run as predicted.

    Raises:
        InputError: no such file, a plan of other devices, or nothing that it can run.
    """
    config = config_of(recipe)
    if file is not None:
        stored_plan = read_json_object(file, "result of hasten estimate --json")
        try:
            stored_layout = _from_values(PlannedLayout, stored_plan["best"][0]["layout"])
            stored_job = _from_values(PlannedJob, stored_plan["job"])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(
                f"--estimate: {file} isn't what hasten estimate --json writes ({error})"
            ) from error
        layout = dataclasses.asdict(stored_layout)
        batch = _batch(recipe, dataclasses.asdict(stored_job))
        arguments(config, layout, batch, cloud.devices)  # refuses what can't be run, before writing
        return layout, batch
    from hasten.planner import plan
    from hasten.planner.cluster import Cluster
    from hasten.planner.inputs import batch_of
    from hasten.planner.layout import LayoutSpace

    sequence = recipe.cutoff_len
    size = batch_of(recipe, sequence)
    job = {"sequence": sequence, "global_batch": size, "task": recipe.finetuning_type}
    batch = _batch(recipe, job)
    if recipe.finetuning_type == "lora":
        arguments(config, {}, batch, cloud.devices)  # says why not
    cluster_plan = plan(
        recipe.model,
        Cluster.of(cloud, gpu),
        PlannedJob(sequence, size, "pretrain" if recipe.from_scratch else "full"),
        space=LayoutSpace(zero=(0, 1), schedules=("1f1b", "interleaved")),
        top=TRIED,
        fewer_nodes=False,
    )
    refused = ""
    for one in cluster_plan.best:
        layout = dataclasses.asdict(one.layout)
        try:
            arguments(config, layout, batch, cloud.devices)
            return layout, batch
        except InputError as error:
            refused = refused or str(error)
    raise InputError(
        f"none of the {len(cluster_plan.best)} best layouts can be launched: {refused}"
    )


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


def _from_values(kind: type[Planned], values: Any) -> Planned:
    """A layout or job out of a file's object.

    Raises:
        ValueError: an unknown field, or a number of another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"no {kind.__name__} but {str(values)[:40]!r}")
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, number in values.items():
        kinds = (type(number).__name__, types.get(name))
        if kinds[0] != kinds[1] and kinds != ("int", "float"):
            raise ValueError(f"{name} is {str(number)[:40]!r}")
    return kind(**values)


def _batch(recipe: Recipe, job: Mapping[str, Any]) -> dict[str, Any]:
    tokens = recipe.max_tokens or job.get("tokens") or 0
    try:
        step = int(job["sequence"]) * int(job["global_batch"])
        steps = recipe.max_steps or int(tokens // step)
    except (ValueError, OverflowError) as error:
        raise InputError(f"--estimate: its job has the tokens {tokens}; give max_steps") from error
    if not steps:
        raise InputError("megatron: give max_steps or max_tokens, since it has no epochs")
    rates = ("learning_rate", "min_lr_ratio", "lr_schedule", "adam_betas", "weight_decay")
    values = {name: getattr(recipe, name) for name in (*rates, "max_grad_norm", "seed")}
    values["warmup_steps"] = share_of(recipe.warmup_steps, steps)
    return {**values, **job, "task": recipe.finetuning_type, "steps": steps}


# The recipe as it is launched: the launcher decides ranks, restarts and where to save.

TINY = {
    "llama": "deepseek-llm-tiny",
    "qwen2": "r1-distill-qwen-tiny",
    "deepseek_v2": "v2-lite-tiny",
    "deepseek_v3": "v3-tiny",
}


def recipe_there(recipe: Recipe, checkpoints: str | None, leave_file: str | None) -> str:
    """The recipe's text for the launch; the launcher controls ranks and restarts.

    Every start continues where the previous one ended. If the plan has no checkpoints, a
    lost machine would cost the whole run. Dynamic checkpoints are therefore added.
    """
    values = recipe.model_dump(mode="json")
    values |= {"nproc": 1, "min_nproc": None, "max_restarts": 0, "warm_restarts": False}
    if recipe.resume == "never":
        values["resume"] = "auto"
    if "checkpoints" not in map(name_of, recipe.plan):
        values["checkpoint_every"] = "dynamic"
    if checkpoints is not None:
        values["checkpoint_dir"] = checkpoints
    if leave_file is not None and recipe.leave_file is None:
        values["leave_file"] = leave_file
    text = recipe_from(values, "the recipe for the launch").to_yaml()
    return f"{MARK}: the recipe as it runs there\n{text}"


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
