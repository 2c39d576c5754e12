"""What a rank asks of torch when it joins with a GPU; no GPU is needed."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hasten.core.setup import Session
from hasten.core.step import batches, train_step, training
from hasten.errors import InputError
from hasten.launch.ranks import backend_for, join_process_group
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.parts.comm import groups
from hasten.parts.comm.topology import host_name
from hasten.recipe import gpu_check
from hasten.techniques.layout import ranks
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.ranks import RanksLayout
from hasten.techniques.layout.tensor import TensorParallel
from host_waits import HostWaits
from rank_jobs import session_on


def joined(world: World) -> list[list[Any]]:
    """The calls in their order; gloo stands in for the backend that was asked for."""
    _, place = environment.meeting()
    dist.destroy_process_group()  # the runner's own
    environment.take_over({"HASTEN_RENDEZVOUS": f"{place}-again"})
    device, calls = f"cuda:{world.local_rank}", list[list[Any]]()
    meet = dist.init_process_group

    def on_gloo(backend: str, device_id: torch.device, **more: Any) -> None:
        calls.append(["init_process_group", backend, str(device_id)])
        meet("gloo", **more)

    with (
        mock.patch("torch.cuda.set_device", lambda d: calls.append(["set_device", str(d)])),
        mock.patch("torch.accelerator.device_count", return_value=2),
        mock.patch("torch.distributed.init_process_group", on_gloo),
    ):
        backend = backend_for(device, ranks=environment.ranks_here(world))
        join_process_group(world, backend, datetime.timedelta(minutes=1), device)
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, device)
    return [*calls, ["objects", told]]


def summed(world: World) -> list[Any]:
    """What ranks of a GPU tell each other lies on the host, and stays there."""
    values = torch.tensor([1.0 + world.rank, 2.0], dtype=torch.float64)
    layout = RanksLayout(world)
    return [
        layout.all_reduce_data(values).tolist(),
        layout.all_reduce_world(values).tolist(),
        values.tolist(),
    ]


def of_nccl_alone(world: World) -> list[str]:
    """Where the same would travel in a user's own group that reaches GPUs alone."""
    here = torch.device("cuda")
    with (
        mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"),
        mock.patch("torch.accelerator.current_accelerator", return_value=here),
        mock.patch("torch.accelerator.current_device_index", return_value=world.rank),
        mock.patch.object(torch.Tensor, "to", lambda values, device: str(device)),
    ):
        return [str(groups.movable(torch.ones(1))), str(groups.own_accelerator())]


def first_contact(world: World) -> dict[str, str]:
    """What ranks are told about their devices, with faults planted; without one, nothing."""
    last = world.rank == world.size - 1
    true_fault, true_sum = gpu_check._fault, dist.all_reduce
    index = "torch.accelerator.current_device_index"

    def sum_of_three(values: torch.Tensor) -> None:
        true_sum(values)
        values.fill_(3.0)

    wrong = mock.patch.object(torch.Tensor, "sum", return_value=torch.tensor(7.0))
    own = f"cuda:{world.rank}"
    nothing = contextlib.nullcontext()
    skipped = mock.patch.object(gpu_check, "_fault", return_value="")
    here = mock.patch(index, return_value=0)
    only_index = mock.patch.object(
        gpu_check, "_fault", lambda place: true_fault(place) if place.index else ""
    )
    return {
        "as they are": _told(world, "cpu", nothing),
        "a product that is wrong": _told(world, "cpu", wrong if last else nothing),
        "one GPU for two": _told(world, "cuda:0", skipped),
        "not the current one": _told(world, own, here, only_index),
        "a wrong sum": _told(world, "cpu", mock.patch.object(dist, "all_reduce", sum_of_three)),
    }


def _told(world: World, device: str, *faults: Any) -> str:
    with contextlib.ExitStack() as planted:
        for fault in faults:
            planted.enter_context(fault)
        try:
            gpu_check.check_ranks(world, device)
        except InputError as error:
            text = str(error).replace(host_name(), "HOST")
            return text.replace(f"rank {world.rank}: the", "rank RANK: the")
    return ""


def waits(world: World) -> dict[str, list[str]]:
    """Where a step of a replicated model makes the host wait for the device."""
    return {name: _waits_of(session_on(world, name)) for name in ("plain", "accumulated")}


def sums(world: World) -> dict[str, list[Any]]:
    """How many sums over ranks a step makes beside those of its gradients and weights.

    And if a step is finite in which only the last rank's loss isn't, with all ranks' positions.
    """
    layouts = {"ddp": DDP(), "fsdp2": FSDP2(), "tp": TensorParallel()}
    found = {}
    for name, layout in layouts.items():
        session = session_on(world, "accumulated", layout)
        count = _sums_of(session)
        loss = torch.tensor(float("inf") if world.rank == world.size - 1 else 1.0)
        numbers = session.engine.norm(loss, 5)
        found[name] = [count, numbers.finite, numbers.positions]
    return found


def _sums_of(session: Session) -> int:
    steps = training(session)
    next(steps)
    with mock.patch.object(ranks, "sum_over_ranks", wraps=groups.sum_over_ranks) as summed:
        next(steps)
    return summed.call_count


def _waits_of(session: Session) -> list[str]:
    steps = batches(session)
    for batch in itertools.islice(steps, 2):
        tensors = list(session.module.state_dict(keep_vars=True).values())
        tensors += [t for m in batch.micro_batches for t in m.inputs.values()]
        with HostWaits(t for t in tensors if isinstance(t, torch.Tensor)) as found:
            train_step(session, batch, 0.0)
    return found.places
