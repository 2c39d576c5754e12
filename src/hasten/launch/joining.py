"""Ranks join: they meet, and make sure before training that they are about to do the same.

(1) the backend is chosen for the device, or refused => (2) rank 0 listens where the launcher says
and the others come => (3) every rank leaves what it is about to do (recipe, versions, data) at the
meeting place; rank 0 compares, and all ranks end with the same sentence where two differ.

Without (3) a rank with another batch size waits in the first exchange until its time is up, and one
with another learning rate trains another model in silence.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Mapping
from typing import Any

import torch

from hasten.errors import AgreedError, InputError
from hasten.launch.naming_ranks import LinkError
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.machine.processes import attempt

BACKENDS = ("auto", "gloo", "nccl")
NCCL = "cpu:gloo,cuda:nccl"  # what lies on the host (numbers, objects, barriers) needs no GPU
ONE_EACH = "nccl wants a GPU for each rank; start no more ranks than GPUs, or say backend: gloo"


def backend_for(device: str, backend: str = "auto", ranks: int = 1) -> str:
    """The backend of torch.distributed for this device; ``ranks`` of the job are on this machine.

    Raises:
        InputError: it isn't known, this torch hasn't it, it can't reach the device's memory, or
            NCCL would find two ranks on one GPU.
    """
    import torch.distributed as dist

    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}; it is one of {', '.join(BACKENDS)}")
    on_cpu = device.startswith("cpu")
    if backend == "gloo" or (backend == "auto" and on_cpu):
        return "gloo"
    if backend == "nccl" and on_cpu:
        raise InputError("backend: nccl moves a GPU's memory and this run is on cpu; say gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise InputError("backend: this torch was built without nccl; say gloo")
    gpus = max(1, torch.accelerator.device_count())
    # A launcher may show each rank its own GPU alone; NCCL then notices two on the same one.
    if ranks > gpus and not (gpus == 1 and environment.is_shown_some_gpus()):
        raise InputError(f"{ranks} ranks here and {gpus} GPU(s): {ONE_EACH}")
    return NCCL


def join(
    world: World, backend: str, timeout: datetime.timedelta, device: str | torch.device = "cpu"
) -> None:
    """Meet the other ranks and form the default process group.

    From here on the rank's GPU is the current device of this thread: objects, barriers and kernels
    that name no device use it. Other threads begin with GPU 0 and have to name theirs.

    Raises:
        InputError: the meeting place can't be had or reached, or two ranks have one GPU.
        LinkError: the same in a later attempt: the settings have worked before.
    """
    import torch.distributed as dist

    method, place = environment.meeting()
    bound = torch.device(device) if backend == NCCL else None
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            init_method=method,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=bound,
        )
    except (dist.DistError, TimeoutError, OSError) as error:
        kind = InputError if attempt() == 1 else LinkError
        raise kind(_no_meeting(world, place, timeout, error)) from error


def _no_meeting(world: World, place: str, timeout: datetime.timedelta, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "Duplicate GPU" in str(error):
        return f"rank {world.rank} has the GPU of another rank: {ONE_EACH}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return (
            f"rank {world.rank} can't listen at {place}, as another program does: end it, or set "
            "MASTER_PORT to a free port on all ranks"
        )
    return (
        f"rank {world.rank} of {world.size} didn't meet the others at {place} within "
        f"{timeout.total_seconds():g} s: {first[:200]}; see whether rank 0 runs there, and whether "
        "the port is free and open between the machines (MASTER_ADDR, MASTER_PORT)"
    )


def agree(world: World, said: Mapping[str, Mapping[str, Any]], subject: str = "start") -> None:
    """Make sure that all ranks are about to do the same; inside a process group.

    Args:
        said: by topic (recipe, version, records), names and plain values.
        subject: names this comparison; another for each in a run.

    Raises:
        AgreedError: two ranks differ; the same sentence on every rank.
    """
    if world.size == 1:
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = dist.PrefixStore(f"hasten/agree/{subject}", _get_default_store())
    mine = json.dumps({"host": socket.gethostname(), "said": said}, sort_keys=True, default=str)
    store.set(str(world.rank), mine)
    if world.is_main:
        everyone = [json.loads(store.get(str(rank))) for rank in range(world.size)]
        store.set("verdict", _difference(everyone))
    verdict = store.get("verdict").decode()
    store.set(f"read/{world.rank}", "")
    if world.is_main:  # the meeting place goes with this process: the others read first
        store.wait([f"read/{rank}" for rank in range(world.size)])
    if verdict:
        raise AgreedError(verdict)


def _difference(everyone: list[dict[str, Any]]) -> str:
    """A sentence for the first rank that differs from rank 0; empty where none does."""
    ours = everyone[0]["said"]
    for rank, other in enumerate(everyone):
        theirs = other["said"]
        for topic in [*ours, *(set(theirs) - set(ours))]:
            one, two = ours.get(topic, {}), theirs.get(topic, {})
            keys = [k for k in [*one, *sorted(set(two) - set(one))] if one.get(k) != two.get(k)]
            if keys:
                more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
                return (
                    f"rank {rank} ({other['host']}) has another {topic} than rank 0 "
                    f"({everyone[0]['host']}): {keys[0]} is {_short(two.get(keys[0]))} there and "
                    f"{_short(one.get(keys[0]))} on rank 0{more}; start all ranks with the same"
                )
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
