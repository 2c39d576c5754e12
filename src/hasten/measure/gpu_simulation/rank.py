"""One rank's trace of a recipe, in a process that has the simulated devices."""

from __future__ import annotations

import datetime
import gc
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hasten.launch.ranks import process_group, rank_environment
from hasten.machine import environment, host
from hasten.measure.gpu_simulation.node import GroupOptions, simulate_groups
from hasten.measure.gpu_simulation.recipe_job import SimulatedRecipe
from hasten.measure.gpu_simulation.roofline import SimulatedDevice
from hasten.measure.gpu_simulation.step import Traced, extrapolated, traced
from hasten.measure.gpu_simulation.tracer import Key, Tracer
from hasten.models.load import count_parameters, read_config
from hasten.recipe.schema import recipe_from

# Imported before ranks are forked, in the place of once in each of them.
PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("peft", "hasten.techniques"),
)
LINK_SECONDS = 120.0  # a rank waits so long for the others


def preload(values: Mapping[str, Any]) -> None:
    """Import what ranks of the recipe need, its model's code included.

    Raises:
        InputError: the recipe or its model's config can't be used.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    paper = SimulatedRecipe(recipe_from(dict(values), "recipe"))
    with paper.few_layers() as few:
        count_parameters(read_config(few.model))
    gc.freeze()


def trace_rank(
    device: SimulatedDevice,
    values: Mapping[str, Any],
    full_model: bool,
    rank: int,
    count: int,
    directory: Path,
) -> dict[str, Any]:
    """Trace of one step of the recipe on this rank, as plain values.

    Args:
        values: the recipe's keys.
        full_model: trace the full model and step instead of a few layers and passes.
        directory: a folder through which the ranks connect.
    """
    meeting = GroupOptions()
    if count > 1:
        environment.take_over(rank_environment(rank, count, directory, threads=1))
        meeting = simulate_groups()
    torch.set_num_threads(1)
    default_device = host.default_device()
    timeout = datetime.timedelta(seconds=LINK_SECONDS)
    with process_group(environment.world(), default_device, timeout):
        paper = SimulatedRecipe(recipe_from(dict(values), "recipe"))
        each = paper.examples // paper.passes or 1  # examples of a pass, over all ranks
        last = Traced({}, frozenset(), {})

        def at(layers: int, passes: int) -> Mapping[Key, float]:
            nonlocal last
            examples = paper.examples if passes == paper.passes else each * passes
            with paper.sized(layers, examples) as sized:
                share = max(1, round(each / sized.setup().layout.data_size))
                tracer = Tracer(device, (paper.recipe.cutoff_len,) * share)
                last = traced(sized.session, tracer)
            return last.counts

        counts = (
            at(paper.layers, paper.passes)
            if full_model
            else extrapolated(at, paper.layers, paper.passes, paper.fewest_layers)
        )
        current = f"cuda:{torch.cuda.current_device()}"
    return {
        "device": default_device,
        "current_device": current,
        "meeting": vars(meeting),
        "plan": [str(technique) for technique in paper.plan],
        "layers": paper.layers,
        "passes": paper.passes,
        "tensors_on": sorted(last.devices),
        "messages": [[*message, size] for message, size in last.messages.items()],
        "counts": [[*key, value] for key, value in counts.items()],
    }
