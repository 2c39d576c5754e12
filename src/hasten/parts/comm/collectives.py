"""Topology-aware collectives that send as little as possible between hosts.

    collective = TopoAwareCollective(backend="nccl", topology="dgx_a100")
    collective.all_reduce(gradient)           # in place, as torch.distributed's
    print(collective.explain())

The cost model of ``link_model`` chooses one of three algorithms for an all-reduce:

- flat: one ring over all ranks, host by host
- hierarchical: a reduce-scatter within the host, an all-reduce of each share
  across hosts, an all-gather within the host. With a codec the all-reduce is a
  reduce-scatter and an all-gather of encoded numbers
- leader: a sum on one rank of each host, a ring of these ranks, and a broadcast within
  the host; for tiny tensors

All ranks use rank 0's plan, which is made at the first call and broadcast. If ranks have
different settings, all of them raise an error. Results have the same bits on all ranks.
With NCCL, which finds rings, trees and rank order itself, flat is used unless there is a
codec. Calls must come from one thread at a time, in the same order on all ranks.

    works = [collective.all_reduce(p.grad, "mean", async_op=True) for p in parameters]
    for work in works:
        work.wait()                           # each gradient is ready after its own
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.machine.host import has_cuda
from hasten.parts.comm import collective_plan
from hasten.parts.comm.codecs import Codec
from hasten.parts.comm.collective_plan import (
    HALVES,
    CollectivePlan,
    CollectiveSettings,
    Route,
    check_way,
    codecs_for,
    gather,
    rail_order,
    scatter_sum,
    sent_bytes,
    sum_across,
)
from hasten.parts.comm.groups import (
    Groups,
    OrderedThread,
    at_once,
    bucket_hook,
    gathered_objects,
    world_size,
)
from hasten.parts.comm.methods import ErrorMemory
from hasten.parts.comm.rank_check import CollectiveError, RankReports, checksum, drift_message
from hasten.parts.comm.topology import Topology, host_name

__all__ = ["CollectiveError", "TopoAwareCollective"]

OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class TopoAwareCollective:
    """All-reduce, reduce-scatter and all-gather over the default process group's ranks.

    Args:
        backend: "nccl" or "gloo", as the process group. Without a GPU "nccl" means gloo, with
            a warning.
        topology: "dgx_a100", "dgx_h100", "fat_tree", "pcie", "ethernet", or a ``Topology``.
            "detect" reads the links from the system, "measure" measures them in a second.
        way: "auto" (the cheapest by the model), "flat", "hierarchical" or "leader".
        within, between: the codec within and between hosts: "none", "bf16", "half", "int8",
            "int4".
        host: name of this rank's host; default: from its machine and network.
        timeout: seconds that a collective may take.

    Raises:
        ValueError: a setting is unknown. At the first call, on all ranks: settings differ.
        CollectiveError: a collective failed; the message names the missing ranks.
    """

    def __init__(
        self,
        backend: str = "nccl",
        topology: str | Topology = "detect",
        *,
        way: Literal["auto", "flat", "hierarchical", "leader"] = "auto",
        within: str = "none",
        between: str = "none",
        host: str = "",
        timeout: float = 60.0,
    ) -> None:
        self.settings = CollectiveSettings(backend, topology, way, within, between, timeout)
        if backend == "nccl" and not has_cuda():
            warnings.warn("there is no GPU here: backend='nccl' means 'gloo'", stacklevel=2)
        self.calls = 0
        self.bytes_sent = 0  # bytes to other hosts in hierarchical calls, without headers
        self._host = host
        self._plan: CollectivePlan | None = None
        self._groups: Groups | None = None
        self._reports: RankReports | None = None
        self._queue = WorkQueue()

    @property
    def topology(self) -> Topology:
        """Returns hosts and links of the plan; all ranks call it, or none."""
        self.wait_all()
        return self._prepared().topology

    def all_reduce(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        route: Route | None = None,
        memory: ErrorMemory | None = None,
        name: str = "",
    ) -> Any:
        """Reduces over all ranks in place and returns the tensor.

        ``op`` is sum, mean, max or min; max and min always use flat.

        ``route`` replaces the plan's route and must be the same on all ranks. With ``memory``,
        the error of a codec between hosts is added at the next call with the same ``name``.

        With ``async_op`` it returns a :class:`CollectiveWork` at once. The tensor is ready
        after its ``wait()``. Works run one after the other, in the order of the calls. If the
        caller drops a work, the program waits for it at that point.
        """
        if op not in OPS:
            raise ValueError(f"op is {op!r}; it must be one of {', '.join(OPS)}")
        if op == "mean" and not tensor.is_floating_point():
            raise ValueError(f"op is 'mean' for {tensor.dtype}; whole numbers have a sum")
        if async_op:
            return self._queue.put(lambda: self._all_reduce(tensor, op, route, memory, name))
        self.wait_all()
        return self._all_reduce(tensor, op, route, memory, name)

    def wait_all(self) -> None:
        """Waits for all started works; raises the error of a work without a ``wait()``."""
        self._queue.wait_all()

    def _all_reduce(
        self, tensor: Tensor, op: str, route: Route | None, memory: ErrorMemory | None, name: str
    ) -> Tensor:
        plan = self._prepared()
        if plan.topology.ranks > 1 and tensor.numel():
            route = route or self._route(plan, tensor.numel())
            route = route if op in ("sum", "mean") else Route()
            collective_plan.check_way(route.way, plan.topology.hosts)
            with self._called(f"all_reduce ({route})"):
                self._reduce(tensor, route, op, memory, name)
        return tensor

    def reduce_scatter(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Returns this rank's shard of the sum (or mean); the tensor has one shard per rank.

        Raises:
            ValueError: the number of ranks doesn't divide the tensor.
        """
        if op not in ("sum", "mean"):
            raise ValueError(f"op is {op!r}; reduce_scatter supports sum and mean")
        self.wait_all()
        topology = self._prepared().topology
        if tensor.numel() % topology.ranks:
            raise ValueError(
                f"a tensor of {tensor.numel()} numbers has no equal piece for each of "
                f"{topology.ranks} ranks; pad it"
            )
        if topology.ranks == 1:
            return tensor.clone()
        with self._called("reduce_scatter"):
            groups, route = self._groups_of(topology), self._route(self._prepared(), tensor.numel())
            early = _divides_early(op, tensor, route)
            scaled = tensor / topology.ranks if early else tensor
            if topology.uniform:
                codecs = codecs_for(tensor, route)
                pieces = scaled.reshape(topology.ranks, -1)[list(rail_order(topology))]
                share = scatter_sum(pieces.view(-1), groups.within, codecs[0], cut=False)
                shard = self._across(share, groups, codecs[1])
            else:
                pieces = scaled.reshape(topology.ranks, -1)[list(topology.order)]
                shard = scatter_sum(pieces.view(-1), groups.ordered)
            late = op == "mean" and not early
            return (shard / topology.ranks if late else shard).to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns all ranks' tensors, flat and end to end; sizes are equal, no codec is used."""
        self.wait_all()
        topology = self._prepared().topology
        flat = tensor.reshape(-1)
        if topology.ranks == 1:
            return flat.clone()
        with self._called("all_gather"):
            groups = self._groups_of(topology)
            order: Sequence[int] = topology.order
            if topology.uniform:
                order = rail_order(topology)
                across = gather(flat, groups.across)
                self.bytes_sent += across.nbytes - flat.nbytes
                gathered = gather(across, groups.within, cut=False)
            else:
                gathered = gather(flat, groups.ordered)
            by_rank = torch.empty_like(gathered).view(topology.ranks, -1)
            by_rank[list(order)] = gathered.view(topology.ranks, -1)
            return by_rank.view(-1)

    def explain(self) -> str:
        """Describes hosts, links, costs for 1 KB, 1 MB and 25 MB, and the choice with a reason."""
        self.wait_all()
        return collective_plan.explanation(self._prepared(), self.settings)

    def _route(self, plan: CollectivePlan, numbers: int) -> Route:
        return Route(plan.way(numbers), self.settings.within, self.settings.between)

    def _reduce(
        self, tensor: Tensor, route: Route, op: str, memory: ErrorMemory | None, name: str
    ) -> None:
        topology = self._prepared().topology
        groups = self._groups_of(topology)
        early = _divides_early(op, tensor, route)
        reduced = (tensor / topology.ranks if early else tensor).contiguous()
        if route.way == "hierarchical":
            # The sum, flat.
            ranks, count = self._prepared().topology.ranks, reduced.numel()
            within, between = codecs_for(reduced, route)
            flat = reduced.reshape(-1)
            padding = -count % ranks
            flat = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
            share = scatter_sum(flat, groups.within, within, cut=False)
            if between is None:
                share = sum_across(share, groups.across)
                pieces = share[: share.numel() // groups.across.size()]
                self.bytes_sent += 2 * sent_bytes(pieces, groups.across, None)
            else:
                shard = self._across(share, groups, between, memory, name)
                self.bytes_sent += sent_bytes(shard, groups.across, between)
                share = gather(shard, groups.across, between, memory, f"{name}/mean")
            reduced = gather(share, groups.within, within, cut=False)[:count].view(tensor.shape)
        elif route.way == "leader":
            host_ranks = topology.hosts[topology.host_of(dist.get_rank())]
            dist.reduce(reduced, host_ranks[0], group=groups.within)
            if dist.get_rank() == host_ranks[0]:
                dist.all_reduce(reduced, group=groups.leaders)
            dist.broadcast(reduced, host_ranks[0], group=groups.within)
        else:
            dist.all_reduce(reduced, op=OPS[op], group=groups.ordered)
        if op == "mean" and not early:
            reduced.div_(topology.ranks)
        if reduced is not tensor:
            tensor.copy_(reduced)

    def _across(
        self,
        share: Tensor,
        groups: Groups,
        codec: Codec | None,
        memory: ErrorMemory | None = None,
        name: str = "",
    ) -> Tensor:
        shard = scatter_sum(share, groups.across, codec, memory, name)
        self.bytes_sent += sent_bytes(share[: shard.numel()], groups.across, codec)
        return shard

    def prepare(self) -> None:
        """Agrees on the plan and opens the groups; all ranks call it, or their first collective."""
        self.wait_all()
        if world_size() > 1:
            self._groups_of(self._prepared().topology)

    def _prepared(self) -> CollectivePlan:
        if self._plan is None:
            if world_size() == 1:
                return collective_plan.alone()
            with self._named("agreeing on a plan"):
                self._plan = collective_plan.agreed(self.settings, self._host or host_name())
        return self._plan

    def _groups_of(self, topology: Topology) -> Groups:
        if self._groups is None:
            with self._named("opening process groups"):
                self._groups = Groups.opened(topology, self.settings.timeout)
        return self._groups

    def _called(self, what: str) -> AbstractContextManager[None]:
        self.calls += 1
        return self._named(f"{what}, call {self.calls}")

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Context that turns a failure into an error with the missing ranks."""
        if self._reports is None:
            members, seconds = range(dist.get_world_size()), self.settings.timeout
            self._reports = RankReports("collective", members, seconds)
        failure = self._reports.first_failure
        if failure is not None:
            raise CollectiveError(f"no further collective: {failure}", failure.missing)
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:  # torch has no class for gloo's errors
            raise self._reports.failed(what, error) from error


def _divides_early(op: str, tensor: Tensor, route: Route) -> bool:
    """Returns True if a mean is divided before the sum, which may be too large for fp16."""
    return op == "mean" and (tensor.dtype in HALVES or "half" in (route.within, route.between))


class CollectiveWork:
    """A collective in progress.

    If it is freed without ``wait()``, it waits all the same, so that no unfinished tensor is read.
    The next call then raises its error.
    """

    def __init__(self, future: Future[Tensor], retrieved: set[Future[Tensor]]) -> None:
        self._future, self._retrieved = future, retrieved

    def wait(self) -> bool:
        """Waits until the tensor is ready. Raises the collective's error."""
        self.result()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> Tensor:
        """Returns the tensor, once it is ready."""
        self._retrieved.add(self._future)
        return self._future.result()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # at the program's end attributes may be gone
            wait([self._future])


class WorkQueue:
    """Runs collectives in one thread, in the order of the calls, as all ranks issue them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[Tensor]] = []
        self._retrieved: set[Future[Tensor]] = set()  # works with a requested result or error

    def put(self, run: Callable[[], Tensor]) -> CollectiveWork:
        """Starts a work; an error of an earlier one without a ``wait()`` is raised first."""
        self._synchronize([future for future in self._begun if future.done()])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "collectives", initializer=_same_device())
        future = self._pool.submit(run)
        self._begun.append(future)
        return CollectiveWork(future, self._retrieved)

    def wait_all(self) -> None:
        """Waits until all works are done; raises an error that was not raised yet."""
        self._synchronize(list(self._begun))

    def _synchronize(self, futures: list[Future[Tensor]]) -> None:
        wait(futures)
        self._begun = [future for future in self._begun if future not in futures]
        unretrieved = [future for future in futures if future not in self._retrieved]
        self._retrieved.difference_update(futures)
        for future in unretrieved:
            future.result()


def _same_device() -> Callable[[], None]:
    """Returns a function that sets the caller's current device in another thread."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


# DDP's gradient buckets over a topology-aware collective, during the backward pass.
#
#     backward fills a bucket -> hook -> queue -> one worker thread, first in first out:
#
#         collective.all_reduce(bucket, "mean", route) -> future -> DDP waits at backward's end
#
# One worker issues all collectives, in the order of the buckets, on groups that no other thread
# uses. Two threads on one group would mix up messages. On an accelerator the stream is the queue,
# and there is no worker.

# First steps without codecs: DDP rebuilds its buckets after the first step, and errors are stored
# by the names of a bucket's parameters.
DENSE_STEPS = 2


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
