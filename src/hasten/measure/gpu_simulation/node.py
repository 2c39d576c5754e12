"""A rank of a simulated node: communication on hosts is real, on GPUs it is simulated.

Every rank is a process. Host tensors are sent by gloo, which makes counts, flags and
objects the ranks' own. Device tensors go to torch's fake process group, which returns
at once. If their values are known, gloo sends them as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg

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


@dataclass
class GroupOptions:
    """The options with which this rank initialised the process group."""

    backend: str = ""
    device_id: str = ""
    current_device: str = ""


def simulate_groups() -> GroupOptions:
    """Let process groups of this process be those of a simulated node."""
    meeting = GroupOptions()
    module: Any = dist
    futures: Any = torch.futures
    futures.Future = _SimulatedFuture
    begin, group, name = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        meeting.backend = str(backend)
        meeting.device_id = str(options.pop("device_id", None))
        meeting.current_device = f"cuda:{torch.cuda.current_device()}"
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
