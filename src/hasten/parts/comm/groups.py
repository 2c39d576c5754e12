"""Process groups and meshes of ranks, a thread for buckets in order, exchanges in pieces."""

from __future__ import annotations

import datetime
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hasten.parts.comm.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank, one for each stage, so messages of two stages can't mix up."""

    within: Any  # a host's ranks
    across: Any  # ranks with the same local rank; None if hosts have unequal numbers of ranks
    ordered: Any  # all ranks, host by host
    leaders: Any  # the first rank of each host

    @classmethod
    def opened(cls, topology: Topology, seconds: float) -> Groups:
        """Opens the groups; every rank calls it. A collective may take ``seconds``."""
        rails = list(zip(*topology.hosts, strict=True)) if topology.uniform else []
        return cls(
            within=open_own_group(topology.hosts, seconds),
            across=open_own_group(rails, seconds),
            ordered=open_own_group([topology.order], seconds),
            leaders=open_own_group([tuple(host[0] for host in topology.hosts)], seconds),
        )


def moves_by_nccl(group: Any = None) -> bool:
    """Returns True if the group has NCCL for GPU tensors; it may have gloo for the host's."""
    return "nccl" in dist.get_backend(group)


def reaches_host(group: Any = None) -> bool:
    """Returns True if this group can send a tensor on the host."""
    return "cpu:" in dist.get_backend_config(group)


def movable(values: Tensor, group: Any = None) -> Tensor:
    """Returns host ``values`` on a device from which the group can send them."""
    return values if reaches_host(group) else values.to(own_accelerator())


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    running = dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if running else 1


def gathered_objects(local_object: Any, group: Any = None) -> list[Any]:
    """Returns every rank's object, on every rank; without a process group, only this rank's."""
    if not (dist.is_available() and dist.is_initialized()):
        return [local_object]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local_object, group=group)
    return gathered


def message_device(group: Any = None) -> torch.device:
    """Returns the device for all messages of a group."""
    return own_accelerator() if moves_by_nccl(group) else torch.device("cpu")


def own_accelerator() -> torch.device:
    """Returns the current device of this thread, which this rank set when it joined."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        raise RuntimeError("there is no accelerator here, and the process group reaches no other")
    return torch.device(device.type, torch.accelerator.current_device_index())


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the elementwise sum over all ranks of a tensor on the host.

    If the process group has gloo, as groups opened by hasten have, gloo sends the tensor, and
    nothing waits for a GPU. In a user's own NCCL-only group the tensor goes over the GPU.
    """
    moved = movable(values)
    moved = moved.clone() if moved is values else moved
    dist.all_reduce(moved)
    return moved.cpu()


def notice_ended_ranks() -> None:
    """Waits for all ranks; to be called before groups are formed.

    A rank that forms a group waits for each of its ranks up to the group's limit of minutes, even
    if one has ended. An exchange with a rank that has ended fails at once.

    Raises:
        RuntimeError: a rank has ended.
    """
    sum_over_ranks(torch.zeros(1))


def open_own_group(
    groups: Iterable[tuple[int, ...]], seconds: float, backend: str | None = None
) -> Any:
    """Opens these groups, ranks in the order given; returns the one with this rank, or None."""
    notice_ended_ranks()
    rank_group = None
    for ranks in groups:
        limit = datetime.timedelta(seconds=seconds)
        group = ordered_group(ranks, timeout=limit, backend=backend)
        rank_group = group if dist.get_rank() in ranks else rank_group
    return rank_group


def ordered_group(ranks: Sequence[int], **settings: Any) -> Any:
    """Returns a new process group with its ranks in the order given, which gloo's ring follows.

    Raises:
        ValueError: torch sorts them (2.11), and they aren't sorted.
    """
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(list(ranks), sort_ranks=False, **settings)
    if list(ranks) != sorted(ranks):
        raise ValueError(
            f"torch {torch.__version__} can't keep the ranks of a group in the order "
            f"{list(ranks)}; install torch 2.12 or newer"
        )
    return dist.new_group(list(ranks), **settings)


Job = tuple[Callable[[], Tensor], "torch.futures.Future[Tensor]", torch.device]


class OrderedThread:
    """Runs jobs in one thread in the order of their arrival, so messages can't mix up.

    The thread ends when this object is freed. It keeps no reference to a finished job: a process
    group in it that outlives the default group would delay the process's end.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def __call__(self, job: Callable[[], Tensor], device: torch.device) -> Any:
        """Returns a future of the job's tensor, or of its error, in the form that DDP waits for."""
        devices = [] if device.type == "cpu" else [device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        # DDP would use an exception as a value; ``then`` raises it.
        answer = done.then(lambda future: future.value())
        self._jobs.put((job, done, device))
        return answer


def at_once(tensor: Tensor) -> Any:
    """Returns a completed future."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def bucket_hook(take, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
    """Calls ``take`` with the bucket; DDP's hook, registered with ``take`` as its state."""
    return take(bucket)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, done, device = entry
        try:
            if device.type != "cpu":  # a thread starts with device 0, which may be another rank's
                torch.accelerator.set_device_index(device)
            done.set_result(job())
        except Exception as error:  # DDP raises it when it waits
            done.set_exception(error)
        del entry, job, done, device


# All-gather and all-to-all in pieces, so that a slow link carries both directions at once.
#
# gloo writes a rank's full message before it reads. So two ranks with a large message for each
# other take turns on their link, at half of its rate (figures in benchmarks/log.md). gloo's ring
# all-reduce cuts its messages; the functions below cut those of all-gather and all-to-all. gloo
# runs several collectives of a group in parallel, in the order of issue, which is the same on all
# ranks.
#
#     travel = all_gather(rows, row, group)    # begins; as torch.distributed's with async_op
#     travel.wait()
#
# Tensors on a device, small messages, and messages inside a host (``cut=False``) aren't cut.

PIECE = 1 << 18  # fewest bytes of a piece; smaller ones cost more time than they gain
MOST = 8  # most pieces of a message; each one adds a latency
# torch 2.13 has new names for these collectives and warns about the old ones.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FullDuplexWork:
    """Works of torch.distributed for the pieces of one message; ``finish`` runs after the last.

    On a processor ``wait`` blocks this thread, on a GPU its stream.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = list(works), finish

    def wait(self) -> None:
        """Waits; raises RuntimeError if a rank didn't answer."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None

    def on_arrival(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` from one of torch's threads after all pieces have arrived."""
        missing, lock = len(self._works), threading.Lock()

        def one_more(_: Any) -> None:
            nonlocal missing
            with lock:
                missing -= 1
                last = not missing
            if last:
                callback()

        for work in self._works:
            work.get_future().add_done_callback(one_more)


def all_gather(rows: Tensor, row: Tensor, group: Any = None, cut: bool = True) -> FullDuplexWork:
    """Gathers every rank's ``row`` into ``rows``, (ranks, numbers) or (ranks * numbers,)."""
    table, count = rows.view(dist.get_world_size(group), -1), row.numel()
    cuts = _cuts(row, count) if cut else [(0, count)]
    if len(cuts) == 1:
        work = _all_gather(rows.view(-1), row.view(-1), group=group, async_op=True)
        return FullDuplexWork([work])
    return FullDuplexWork(
        [
            dist.all_gather(list(table[:, a:b]), row.view(-1)[a:b], group=group, async_op=True)
            for a, b in cuts
        ]
    )


def all_to_all(
    received: Tensor, rows: Tensor, group: Any = None, cut: bool = True
) -> FullDuplexWork:
    """Sends part r of ``rows`` to rank r; part r of ``received`` comes from it."""
    world = dist.get_world_size(group)
    count = rows.numel() // world
    cuts = _cuts(rows, count) if cut else [(0, count)]
    if len(cuts) == 1:
        return FullDuplexWork([dist.all_to_all_single(received, rows, group=group, async_op=True)])
    sent_rows, received_rows = rows.view(world, -1), received.view(world, -1)
    leaving = [sent_rows[:, a:b].contiguous() for a, b in cuts]
    coming = [torch.empty_like(chunk) for chunk in leaving]
    works = [
        dist.all_to_all_single(new, old, group=group, async_op=True)
        for new, old in zip(coming, leaving, strict=True)
    ]

    def copy_received() -> None:
        leaving.clear()  # sent tensors had to exist until now
        for (a, b), chunk in zip(cuts, coming, strict=True):
            received_rows[:, a:b].copy_(chunk)

    return FullDuplexWork(works, copy_received)


def _cuts(tensor: Tensor, count: int) -> list[tuple[int, int]]:
    """Returns the bounds of the pieces of ``count`` numbers; one piece on a GPU or if few."""
    size = tensor.element_size()
    step = max(PIECE // size, -(-count // MOST))
    if not tensor.is_cpu or count <= step:
        return [(0, count)]
    return [(low, min(low + step, count)) for low in range(0, count, step)]


AXES = ("dp", "shard", "pp", "tp")  # axes of the mesh, outermost first


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis of a layout.

    - dp: copies that average their gradients
    - shard: pieces of each weight, gathered for a block's pass (FSDP2)
    - tp: pieces of each layer, each computed on its rank (tensor parallel)
    - pp: stages of a pipeline
    - ep: neighbours of the same stage and piece, among dp x shard, that share a layer's experts

    Ranks are numbered with ``tp`` innermost and ``dp`` outermost. So the ranks that communicate
    most are neighbours: on one machine, if its ranks are numbered consecutively.

    Raises:
        ValueError: an axis without a rank, or ``ep`` doesn't divide dp x shard.
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"{axis} is {size}; it is a number of ranks, at least 1")
        if self.data_size % self.ep:
            raise ValueError(
                f"ep is {self.ep} and must divide dp x shard, which is {self.data_size}"
            )

    @property
    def size(self) -> int:
        return self.data_size * self.partners

    @property
    def data_size(self) -> int:
        """Returns the number of ranks, or groups of ranks, with different examples."""
        return self.dp * self.shard

    @property
    def partners(self) -> int:
        """Returns the number of ranks with the same examples."""
        return self.pp * self.tp

    def data_rank(self, rank: int) -> int:
        """Returns the index of a rank's examples, from 0 to ``data_size`` - 1."""
        return rank // self.partners

    def stage(self, rank: int) -> int:
        """Returns the index of a rank in its pipeline."""
        return rank // self.tp % self.pp

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in ("dp", "shard", "tp", "pp"))

    def check(self, world_size: int) -> None:
        """Raises ValueError unless the product of the axes is the number of ranks."""
        if self.size != world_size:
            raise ValueError(f"{self} is {self.size} ranks and {world_size} are running")

    def build(self, device_type: str) -> DeviceMesh:
        """Builds the mesh over all ranks, with ``shard`` and every axis of several ranks.

        Each rank of the process group calls it.
        """
        return _mesh(device_type, {axis: getattr(self, axis) for axis in AXES}, ("shard",))

    def experts(self, device_type: str) -> DeviceMesh:
        """Builds the mesh of ranks that hold the same experts and of those that share them.

        It has the axes ``replicas`` and ``experts``. Each rank of the process group calls it.
        """
        names = ("replicas", "experts")
        sizes = {"replicas": self.data_size // self.ep, "experts": self.ep}
        mesh = _mesh(device_type, {**sizes, "pp": self.pp, "tp": self.tp}, names)
        return mesh[names]


def _mesh(device_type: str, sizes: dict[str, int], always: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of these axes without those of one rank, but for some."""
    axes = {name: size for name, size in sizes.items() if size > 1 or name in always}
    notice_ended_ranks()
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(mesh: DeviceMesh, copies: bool = True) -> DeviceMesh:
    """Returns FSDP2's mesh: an axis of shards, and one of copies if it averages gradients."""
    names = mesh.mesh_dim_names or ()
    return mesh["dp", "shard"] if copies and "dp" in names else mesh["shard"]
