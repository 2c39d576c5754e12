"""DDP's gradient buckets over a topology-aware collective, while backward still runs.

    backward fills a bucket -> hook -> queue -> one worker thread, first in first out:

        collective.all_reduce(bucket, "mean", route) -> future -> DDP waits at backward's end

One worker issues all collectives of the routes, in the buckets' order, on their own
groups. Two threads on one group would mix up messages. A flat route goes straight to
the default group, as DDP's own all-reduce does. On an accelerator there is no worker:
the stream is the queue.

The clock has three values:

- ``busy``: the time that the buckets took
- ``exposed``: the time after the last bucket was ready, when backward had to wait
- ``window``: the time from the first bucket to the last, which can hide communication
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.parts.comm.collective_plan import Route, check_way
from hasten.parts.comm.collectives import TopoAwareCollective
from hasten.parts.comm.groups import OrderedThread, at_once, bucket_hook
from hasten.parts.comm.methods import ErrorMemory
from hasten.parts.comm.rank_check import CollectiveError, checksum, drift_message

DENSE_STEPS = 2  # DDP forms its buckets anew after the first step; what is left out needs a name


@dataclass
class StepTraffic:
    """Seconds of one step's buckets, and how many there were; on a GPU seconds stay 0."""

    busy: float = 0.0
    exposed: float = 0.0
    window: float = 0.0
    buckets: int = 0
    numbers: int = 0

    @property
    def hidden(self) -> float:
        return max(0.0, self.busy - self.exposed)


class RoutedBuckets:
    """Hook, worker, error memory and clock of one DDP module.

    ``route`` may be changed between two steps, on all ranks alike. ``scale`` is the current
    factor of the gradients (loss scaling). The errors are stored in the gradients' own
    unit.
    """

    def __init__(
        self,
        collective: TopoAwareCollective,
        route: Route,
        feedback: bool = True,
        scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.collective, self.route = collective, route
        self.last = StepTraffic()  # of the step before
        self.steps = 0  # whose gradients have travelled
        self.routed = 0  # buckets that took another route than flat
        self._flat_bytes = 0
        self._memory = ErrorMemory() if feedback else None
        self._scale = scale
        self._names: dict[int, str] = {}
        self._now, self._began, self._done = StepTraffic(), 0.0, 0.0
        self._in_order: OrderedThread | None = None

    def attach(self, module: nn.Module) -> None:
        """Take the module's buckets over; all ranks call it.

        Raises:
            ValueError: the module isn't wrapped in DistributedDataParallel, or these hosts don't
                allow the route.
        """
        if not isinstance(module, DistributedDataParallel):
            raise ValueError("buckets are those of DistributedDataParallel: wrap the module first")
        self.collective.prepare()  # here, so that no group is opened in the middle of backward
        check_way(self.route.way, self.collective.topology.hosts)
        self._names = {id(p): name for name, p in module.module.named_parameters()}
        self._in_order = OrderedThread()
        module.register_comm_hook(self.take, bucket_hook)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent: to other hosts by a route, in all by the flat ring."""
        return self.collective.bytes_sent + self._flat_bytes

    def step(self) -> None:
        """Stores the errors of the step's messages, because the step was taken."""
        if self._memory is not None:
            self._memory.commit(True)

    def forget(self) -> None:
        """Clears the error memory: no codec will be used again."""
        if self._memory is not None:
            self._memory.load({})

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Compare weights over ranks; all call it between the same two steps.

        Raises:
            CollectiveError: a rank's weights are not rank 0's.
        """
        weights = list(parameters)
        local_checksum = torch.tensor([checksum(weights)], device=weights[0].device)
        rows = [torch.empty_like(local_checksum) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, local_checksum)
        checksums = torch.cat(rows).tolist()  # waits for the device
        wrong = [rank for rank, value in enumerate(checksums) if value != checksums[0]]
        if wrong:
            raise CollectiveError(drift_message(wrong, self.steps))

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket on its way; the future has the mean over all ranks."""
        now = time.perf_counter()
        if bucket.index() == 0:
            self._begin(now)
        self._now.buckets += 1
        self._now.numbers += bucket.buffer().numel()
        if bucket.is_last():
            self._now.window = now - self._began
        route = self.route if self.steps > DENSE_STEPS else Route(self.route.way)
        if route.way == "flat":
            return self._straight(bucket.buffer(), now, bucket.is_last())
        self.routed += 1
        names = [self._names.get(id(p), "?") for p in bucket.parameters()]
        name = f"{names[0]}..{names[-1]}"
        return self._by_worker(bucket.buffer(), route, name, now, bucket.is_last())

    def _begin(self, now: float) -> None:
        self._now, self._began, self._done = StepTraffic(), now, now
        self.steps += 1
        if self._memory is not None:
            self._memory.commit(False)  # of a step that was skipped; step() has taken the others
            self._memory.scale = self._scale()

    def _straight(
        self, buffer: Tensor, requested_at: float, last: bool
    ) -> torch.futures.Future[Tensor]:
        world = dist.get_world_size()
        self._flat_bytes += 2 * buffer.nbytes * (world - 1) // world
        buffer.div_(world)  # before the sum, as DDP does: fp16 can't hold all
        work: Any = dist.all_reduce(buffer, async_op=True)

        def over(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            if buffer.is_cpu:  # a GPU's future is there as soon as the work is queued
                self._note(requested_at, last)
            return future.value()[0]

        averaged_future: torch.futures.Future[Tensor] = work.get_future().then(over)
        return averaged_future

    def _by_worker(
        self, buffer: Tensor, route: Route, name: str, requested_at: float, last: bool
    ) -> torch.futures.Future[Tensor]:
        memory = self._memory if self.steps > DENSE_STEPS else None

        def send() -> Tensor:
            self.collective.all_reduce(buffer, "mean", route=route, memory=memory, name=name)
            if buffer.is_cpu:
                self._note(requested_at, last)
            return buffer

        if buffer.is_cpu and self._in_order is not None:
            averaged_future: torch.futures.Future[Tensor] = self._in_order(send, buffer.device)
            return averaged_future
        return at_once(send())

    def _note(self, requested_at: float, last: bool) -> None:
        """A bucket is back; they come back in their order."""
        done = time.perf_counter()
        self._now.busy += done - max(requested_at, self._done)
        self._done = done
        if last:
            self._now.exposed = done - requested_at
            self.last = self._now

    def state_dict(self) -> dict[str, Any]:
        """Returns the error memory of all ranks, gathered; every rank calls it."""
        if self._memory is None or not dist.is_initialized():
            return {"ranks": []}
        local_state = self._memory.state()
        ranks: list[dict[str, Tensor]] = [local_state] * dist.get_world_size()
        dist.all_gather_object(ranks, local_state)
        return {"ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores this rank's error memory; empty if the number of ranks has changed."""
        ranks = state["ranks"]
        if self._memory is not None and dist.is_initialized():
            same = len(ranks) == dist.get_world_size()
            self._memory.load(ranks[dist.get_rank()] if same else {})
