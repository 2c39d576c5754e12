"""Reads the inputs of ``hasten estimate``: cluster, job, price, runs to compare with."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hasten.core.plan import name_of
from hasten.errors import InputError
from hasten.foreign_files import read_json_object
from hasten.formatting import aligned, number
from hasten.launch.cluster import CloudConfig
from hasten.machine.accelerators import PCIE4, Device, device
from hasten.models.architecture import Architecture
from hasten.models.presets import PRESETS
from hasten.planner.cluster import CHIPS, Cluster, own_machine
from hasten.planner.layout import Layouts, PlannedJob, PlannedLayout, layout_text
from hasten.planner.memory import LORA_SHARE
from hasten.planner.numbers import Calibration
from hasten.planner.own_runs import (
    CalibratedTerm,
    OwnRun,
    calibrate_machine,
    measured_steps,
    table,
    terms_of_run,
)
from hasten.planner.predict import candidate, predict
from hasten.recipe.price import Price, price_of
from hasten.recipe.yaml_reader import read_yaml_file

if TYPE_CHECKING:
    from hasten.recipe.schema import Recipe


LINK = 10e9  # bytes/s between ranks of a processor, through memory
MOST_RANKS = 1 << 20
BATCH_TOKENS = 4e6  # default tokens of a pre-training step, typical of models with 10^9 weights
# Techniques that split the model, other than FSDP2, which is ZeRO 3.
SPLIT = ("tensor_parallel", "hybrid", "pipeline", "expert_parallel", "deep_speed")
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
HALF = ("autocast", "bf16_master_weights", "float8")  # techniques that don't multiply in float32


def count_of(text: str, what: str) -> float:
    """Returns a number with the suffix k, M, B, T or none.

    Raises:
        InputError: the text isn't such a number, or it isn't positive.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbt]?)\s*", text.lower())
    count = float(match[1]) * _TIMES[match[2]] if match else 0.0
    if count <= 0 or count > 1e18:
        raise InputError(f"{what} is {text!r}; give a number such as 500M, 1B or 14.8T")
    return count


def recipe_of(name: str, overrides: Sequence[str]) -> Recipe | None:
    """Returns the recipe of this name; None for a model."""
    if not name.endswith((".yaml", ".yml")):
        if overrides:
            raise InputError(f"{overrides[0]!r} changes a recipe, but {name} is a model")
        return None
    from hasten.recipe.schema import load_recipe  # loads more than an estimate of a model needs

    return load_recipe(Path(name), overrides)


def cluster_of(
    topology: str,
    gpu: str,
    nodes: int,
    per_node: int,
    memory_gb: float | None = None,
    host_gb: float | None = None,
) -> Cluster:
    """Returns the cluster of these devices; ``gpu`` is a name, or a file with a device's figures.

    Raises:
        InputError: an unknown or missing name, or an incomplete file.
    """
    cluster = _cluster(CloudConfig(nodes, per_node, topology), gpu, memory_gb)
    return cluster if host_gb is None else dataclasses.replace(cluster, host_memory=host_gb * 1e9)


def _cluster(cloud: CloudConfig, gpu: str, memory_gb: float | None) -> Cluster:
    if not gpu and cloud.topology not in CHIPS:
        raise InputError(
            f"--gpu is missing, and --cluster {cloud.topology} doesn't define the devices: give "
            f"their name, such as --gpu h100, or --cluster {' or '.join(CHIPS)}"
        )
    if not gpu.endswith(".json"):
        return Cluster.of(cloud, gpu)
    path = Path(gpu)
    figures = read_json_object(path, "file of a device's figures")
    if figures.get("kind") == "hasten machine rates":
        if not memory_gb:
            raise InputError(f"{path} has no memory size: give --memory, GB of a device")
        link = number(figures.get("link")) or LINK
        measured_cluster = own_machine(figures, memory_bytes=memory_gb * 1e9, link=link)
        return dataclasses.replace(
            measured_cluster, nodes=cloud.nodes, per_node=cloud.gpus_per_node
        )
    like = Cluster.of(cloud, "h100")
    chip = _device(path, figures)
    return dataclasses.replace(like, device=chip, intra=chip.link)


def job_of(
    recipe: Recipe | None,
    devices: int,
    task: str | None,
    sequence: int | None,
    batch: int | None,
    tokens: str | None,
    formats: Sequence[str],
) -> tuple[PlannedJob, list[str]]:
    """Returns the job, and a list of assumed values."""
    assumed = []
    adapts = recipe is not None and recipe.finetuning_type == "lora"
    from_scratch = recipe is None or recipe.from_scratch
    task = task or ("pretrain" if from_scratch else "lora" if adapts else "full")
    sequence = sequence or (recipe.cutoff_len if recipe else None)
    if sequence is None:
        sequence = 4096
        assumed.append("--sequence 4096")
    batch = batch or (batch_of(recipe, sequence) if recipe else None)
    if batch is None:
        few = BATCH_TOKENS / sequence if task == "pretrain" else 64
        batch = devices * 2 ** max(0, round(math.log2(few / devices)))
        assumed.append(f"--global-batch {batch}")
    narrow = recipe is not None and recipe.weights_dtype == "bfloat16"
    halves = recipe and any(name in str(entry) for entry in recipe.plan for name in HALF)
    if narrow:
        assumed.append("float32 masters, and loading in float32: weights_dtype needs less")
    if recipe is not None and not formats and not halves and not narrow:
        assumed.append("16-bit products (the recipe's plan would train in float32)")
    targets = recipe.lora_targets if recipe is not None and adapts else "auto"
    if targets not in ("auto", "attention"):
        assumed.append(f"adapters of {LORA_SHARE:.1%} of the weights: on routed experts it is more")
    count = count_of(tokens, "--tokens") if tokens else 0.0
    if not count and recipe is not None:
        count = float(recipe.max_tokens or (recipe.max_steps or 0) * batch * sequence)
    return PlannedJob(sequence, batch, task, count), assumed


def price_from(path: Path | None) -> Price | None:
    """Returns the price in a file; raises InputError for an invalid file."""
    if path is None:
        return None
    try:
        return cast(Price, price_of(str(path)))
    except ValueError as error:
        raise InputError(f"--price: {error}") from error


def calibration_of(cluster: Cluster, folders: Sequence[Path]) -> Calibration | None:
    """Returns the calibration from the user's runs; None without runs.

    Raises:
        InputError: a folder that isn't a run's, or runs on more devices than the cluster has.
    """
    return calibrate_machine([own_run(folder, cluster) for folder in folders]) if folders else None


def own_run(folder: Path, cluster: Cluster) -> OwnRun:
    """Reads a finished run as a job of full-length sequences with the same number of positions.

    Raises:
        InputError: the folder has no recipe or no steps.
    """
    rows = measured_steps(folder)
    recipe = read_yaml_file(folder / "recipe.yaml", "run's recipe")
    if not isinstance(recipe, dict) or not recipe.get("model"):
        raise InputError(f"{folder}/recipe.yaml isn't a recipe: name the folder of a run")
    model = Architecture.from_config(str(recipe["model"]))
    if recipe["model"] in PRESETS and recipe.get("vocabulary"):
        model = dataclasses.replace(model, vocabulary=_count_of(folder, recipe, "vocabulary", 0))
    size = _object(folder / "summary.json").get("world_size")  # includes a launcher's ranks
    is_size = isinstance(size, int) and 0 < size <= MOST_RANKS
    ranks = int(size or 0) if is_size else _count_of(folder, recipe, "nproc", 1)
    sequence = _count_of(folder, recipe, "cutoff_len", 2048)
    positions = statistics.median(number(row.get("positions")) or 0.0 for row in rows)
    share = max(1, round(positions / sequence / ranks))
    plan = recipe.get("plan") or []
    if not isinstance(plan, list) or not all(isinstance(entry, str | dict) for entry in plan):
        raise InputError(f"{folder}/recipe.yaml: plan is no list of techniques")
    names = set(map(name_of, plan))
    split = sorted(names & set(SPLIT))
    if split:
        raise InputError(
            f"{folder}: its plan splits the model ({split[0]}), which can't be predicted from a "
            "run; supported: runs on ddp or fsdp2"
        )
    narrow = recipe.get("weights_dtype") == "bfloat16"
    layout = PlannedLayout(
        dp=ranks,
        zero=3 if "fsdp2" in names and ranks > 1 else 0,
        micro_batch=share,
        precision="bf16" if narrow or names & set(HALF) else "fp32",
    )
    task = "lora" if recipe.get("finetuning_type") == "lora" else "full"
    run_cluster = cluster
    if cluster.devices != ranks:
        run_cluster = dataclasses.replace(cluster, nodes=1, per_node=max(ranks, 1))
    seconds = statistics.median(number(row["step_seconds"]) or 0.0 for row in rows)
    return OwnRun(model, run_cluster, PlannedJob(sequence, share * ranks, task), layout, seconds)


def _count_of(folder: Path, recipe: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a positive number in a run's recipe, which may have been edited."""
    count = recipe.get(key) or default
    if not isinstance(count, int) or not 0 < count < 1 << 31:
        raise InputError(f"{folder}/recipe.yaml: {key} is {str(count)[:60]!r}, no whole number")
    return int(count)


def batch_of(recipe: Recipe, sequence: int) -> int:
    """Returns the sequences of a recipe's step."""
    from hasten.recipe.schema import DEFAULT_BATCH

    if recipe.global_batch_tokens:
        return max(1, recipe.global_batch_tokens // sequence)
    return recipe.global_batch_size or DEFAULT_BATCH


def _device(path: Path, figures: Mapping[str, Any]) -> Device:
    device_fields = {field.name: field for field in dataclasses.fields(Device)}
    needed = ("name", "peak16", "memory_bytes", "memory_rate", "link")
    for key in figures:
        if key not in device_fields:
            raise InputError(
                f"{path}: unknown key {key!r}; a device has {', '.join(device_fields)}"
            )
    lacks = [key for key in needed if key not in figures]
    if lacks:
        raise InputError(f"{path}: the device lacks {', '.join(lacks)} (FLOP/s, bytes, bytes/s)")
    for key, stored in figures.items():
        is_text = device_fields[key].type == "str"
        figure = number(stored)
        if not (isinstance(stored, str) if is_text else figure is not None and figure >= 0):
            kind = "a text" if is_text else "a finite number, at least 0"
            raise InputError(f"{path}: {key} is {str(stored)[:60]!r}; it must be {kind}")
    return Device(**{"source": str(path), **figures})


# Predictions for a finished run next to its measurements, for ``estimate`` and ``report``.

RATES = "ceiling.json"  # a run's copy of the file of hasten env --bench
UNCALIBRATED = "fitted to published measurements of GPUs; --calibrate RUN fits to this machine"


def is_run(name: str) -> bool:
    """Returns True if a name is the folder of a run instead of a model."""
    return (Path(name) / "metrics.jsonl").is_file() and (Path(name) / "recipe.yaml").is_file()


def predicted_and_measured(
    folder: Path,
    cluster: Cluster,
    calibration: Calibration | None = None,
) -> str:
    """Returns a table of terms: predicted, measured, and if the interval has the measurement."""
    head, terms = _closing(folder, cluster, calibration)
    return f"{head}\n{aligned(table(terms))}" + ("" if calibration else f"\n{UNCALIBRATED}")


def predicted_section(folder: Path) -> dict[str, Any] | None:
    """Returns the table's values for a report; None if the folder has no run to predict."""
    if not is_run(str(folder)):
        return None
    try:
        head, terms = _closing(folder, machine_of(folder))
    except InputError:
        return None
    rows = [dataclasses.asdict(term) for term in terms]
    return {"text": f"{head}; {UNCALIBRATED}", "rows": rows}


def _closing(
    folder: Path,
    cluster: Cluster,
    calibration: Calibration | None = None,
) -> tuple[str, list[CalibratedTerm]]:
    run = own_run(folder, cluster)
    rows = Layouts.of([run.layout])
    prediction = predict(run.architecture, run.cluster, run.job, rows, calibration)
    one = candidate(prediction, rows, 0, run.cluster, run.job)
    head = f"{folder}, {layout_text(run.layout)}: predicted as it ran on {run.cluster.device.name}"
    return head, terms_of_run(one, folder)


def machine_of(folder: Path) -> Cluster:
    """Returns the run's machine: its GPU by name, or measured rates in the run's folder.

    Raises:
        InputError: the machine's rates are unknown; the message explains how to measure
            them.
    """
    summary = _object(folder / "summary.json")
    hardware = summary.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    chips = hardware.get("accelerators")
    if isinstance(chips, list) and chips and isinstance(chips[0], dict):
        chip = device(str(chips[0].get("name")))
        count = len(chips)
        if summary.get("world_size", 1) not in range(1, count + 1):
            raise InputError(
                f"{folder}: it ran on several hosts of {count} {chip.name}, and the network "
                f"isn't recorded: hasten estimate {folder} --gpu {chip.name} --cluster "
                f"fat_tree --nodes N --gpus-per-node {count}"
            )
        joined = chip.link if count <= chip.per_node else PCIE4 * 1e9
        return Cluster(chip, 1, count, joined, joined, topology="single_node")
    rates = _object(folder / RATES)
    if rates.get("kind") == "hasten machine rates":
        memory = number(hardware.get("memory_limit_bytes")) or 16e9
        return own_machine(rates, memory_bytes=memory, link=LINK)
    raise InputError(
        f"{folder}: it ran on a processor, and no datasheet has its rates: hasten env --bench -o "
        f"bench.json, then hasten estimate {folder} --gpu bench.json --memory GB"
    )


def predicted_lines(folder: Path) -> str:
    """Returns lines for a run's report: the table, or a line with the missing input."""
    try:
        return "\n" + predicted_and_measured(folder, machine_of(folder))
    except InputError as error:
        return f"predicted against measured: {error}"


def _object(path: Path) -> dict[str, Any]:
    with contextlib.suppress(InputError):
        return read_json_object(path, "run's file")
    return {}
