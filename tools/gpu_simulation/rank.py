"""One rank's trace of a recipe, in a process that has the simulated devices.

Communication between hosts is real, between GPUs it is simulated. Every rank is a process. Host
tensors are sent by gloo, which makes counts, flags and objects the ranks' own. Device tensors go
to torch's fake process group, which returns at once. If their values are known, gloo sends them
as well.
"""

from __future__ import annotations

import datetime
import gc
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

from gpu_simulation.recipe_job import SimulatedRecipe
from gpu_simulation.roofline import SimulatedDevice
from gpu_simulation.step import Traced, extrapolated, traced
from gpu_simulation.tracer import Key, Tracer
from hasten.launch.ranks import process_group, rank_environment
from hasten.machine import environment, host
from hasten.models.load import read_config, skeleton_of
from hasten.recipe.schema import recipe_from

assert fake_pg  # registers the backend
Answer = TypeVar("Answer")
FAKE = "cpu:gloo,cuda:fake"


class _QuietLogger:
    """DistributedDataParallel's logger, without the times that the CPU build can't take on CUDA."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        return None


class _SimulatedFuture(torch.futures.Future[Answer]):
    """A future that doesn't ask where its tensors lie: a fake's memory is nowhere."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()


def simulate_groups() -> dict[str, str]:
    """Let process groups of this process be those of a simulated node.

    The result has the options with which this rank initialises its group, from then on.
    """
    meeting: dict[str, str] = {}
    module: Any = dist
    futures: Any = torch.futures
    futures.Future = _SimulatedFuture
    begin, group, name = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        meeting["backend"] = str(backend)
        meeting["device_id"] = str(options.pop("device_id", None))
        meeting["current_device"] = f"cuda:{torch.cuda.current_device()}"
        begin("gloo" if backend == "gloo" else FAKE, **options)

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        options.pop("device_id", None)
        return group(*args, backend="gloo" if backend == "gloo" else FAKE, **options)

    def get_backend(*args: Any, **options: Any) -> str:
        return str(name(*args, **options)).replace("fake", "nccl")

    for namespace in (module, dist.distributed_c10d):
        namespace.init_process_group = init_process_group
        namespace.new_group = new_group
        namespace.get_backend = get_backend
    _answer_for_replicas()
    return meeting


def _answer_for_replicas() -> None:
    """Registers a hook with the mean over ranks for DistributedDataParallel.

    DistributedDataParallel requires results from communication, and the fake group returns
    none. The hook isn't registered if a communication method has registered another one.
    """
    replicas: Any = DistributedDataParallel
    before = replicas._pre_forward

    def mean(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        dist.all_reduce(buffer, group=group)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(buffer)
        return answer

    mean.__annotations__.clear()  # the check compares types, and these are strings

    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.logger, _QuietLogger):
            self.logger = _QuietLogger(self.logger)
        if not self._comm_hooks:
            self.register_comm_hook(self.process_group, mean)
        return before(self, *args, **kwargs)

    replicas._pre_forward = pre_forward
    parallel: Any = torch.nn.parallel.distributed
    parallel._verify_param_shape_across_processes = lambda *_, **__: None


# The trace.


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
        skeleton_of(read_config(few.model))
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
    meeting: dict[str, str] = {}
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
        "meeting": meeting,
        "plan": [str(technique) for technique in paper.plan],
        "layers": paper.layers,
        "passes": paper.passes,
        "tensors_on": sorted(last.devices),
        "messages": [[*message, size] for message, size in last.messages.items()],
        "counts": [[*key, value] for key, value in counts.items()],
    }
