"""What a rank asks of torch when it joins with a GPU; no GPU is needed."""

from __future__ import annotations

import datetime
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hasten.launch.ranks import backend_for, join
from hasten.machine import environment
from hasten.machine.environment import World


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
        join(world, backend, datetime.timedelta(minutes=1), device)
    told: list[Any] = [None] * world.size
    dist.all_gather_object(told, device)
    return [*calls, ["objects", told]]
