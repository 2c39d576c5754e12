"""DDP's gradient buckets over a topology-aware collective, during the backward pass.

    backward fills a bucket -> hook -> queue -> one worker thread, first in first out:

        collective.all_reduce(bucket, "mean", route) -> future -> DDP waits at backward's end

One worker issues all collectives, in the buckets' order, on groups of their own. Two threads
on one group would mix up messages. On an accelerator there is no worker: the stream is the
queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.comm.collective_plan import Route, check_way
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.groups import OrderedThread, at_once, bucket_hook, gathered_objects
from hasten.parts.comm.methods import ErrorMemory
from hasten.parts.comm.rank_check import CollectiveError, checksum, drift_message

DENSE_STEPS = 2  # DDP rebuilds its buckets after the first step; errors are stored by name


class RoutedBuckets:
    """Hook, worker thread and error memory of one DDP module.

    ``scale`` is the current factor of the gradients (loss scaling). The errors are stored in
    the gradients' own unit.
    """

    def __init__(
        self,
        collective: TopoAwareCollective,
        route: Route,
        feedback: bool = True,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.collective, self.route = collective, route
        self.steps = 0  # steps with sent gradients
        self.routed = 0  # number of sent buckets
        self._memory = ErrorMemory() if feedback else None
        self._scale = scale
        self._names: dict[int, str] = {}
        self._in_order: OrderedThread | None = None

    def attach(self, module: nn.Module) -> None:
        """Replaces the module's exchange of buckets; all ranks call it.

        Raises:
            ValueError: the module isn't wrapped in DistributedDataParallel, or these hosts don't
                allow the route.
        """
        if not isinstance(module, DistributedDataParallel):
            raise ValueError("buckets are those of DistributedDataParallel: wrap the module first")
        self.collective.prepare()  # here, because no group can be opened during backward
        check_way(self.route.way, self.collective.topology.hosts)
        self._names = {id(p): name for name, p in module.module.named_parameters()}
        self._in_order = OrderedThread()
        module.register_comm_hook(self.take, bucket_hook)

    def step(self) -> None:
        """Stores the errors of the step's messages after the update."""
        if self._memory is not None:
            self._memory.commit(True)

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Compares weights over ranks; all call it between the same two steps.

        Raises:
            CollectiveError: a rank's weights are not rank 0's.
        """
        checksums = gathered_objects(checksum(parameters))
        wrong = [rank for rank, value in enumerate(checksums) if value != checksums[0]]
        if wrong:
            raise CollectiveError(drift_message(wrong, self.steps))

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sends a bucket; the future has the mean over all ranks."""
        if bucket.index() == 0:
            self._begin()
        self.routed += 1
        named = self.steps > DENSE_STEPS
        route = self.route if named else Route(self.route.way)
        memory = self._memory if named else None
        names = [self._names.get(id(p), "?") for p in bucket.parameters()]
        buffer, name = bucket.buffer(), f"{names[0]}..{names[-1]}"

        def send() -> Tensor:
            mean: Tensor = self.collective.all_reduce(
                buffer, "mean", route=route, memory=memory, name=name
            )
            return mean

        if buffer.is_cpu and self._in_order is not None:
            averaged_future: torch.futures.Future[Tensor] = self._in_order(send, buffer.device)
            return averaged_future
        return at_once(send())

    def _begin(self) -> None:
        self.steps += 1
        if self._memory is not None:
            self._memory.commit(False)  # a skipped step's errors; step() has stored the others
            self._memory.scale = self._scale()

    def state_dict(self) -> dict[str, Any]:
        """Returns the error memory of all ranks, gathered; every rank calls it."""
        if self._memory is None or not dist.is_initialized():
            return {"ranks": []}
        return {"ranks": gathered_objects(self._memory.state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores this rank's error memory; empty if the number of ranks has changed."""
        ranks = state["ranks"]
        if self._memory is not None and dist.is_initialized():
            same = len(ranks) == dist.get_world_size()
            self._memory.load(ranks[dist.get_rank()] if same else {})
