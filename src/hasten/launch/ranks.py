"""Ranks of one job: their variables, their process group, and the check that their settings agree.

Ranks that hasten starts meet through a file in the run's folder. They communicate over
the loopback interface; no port is opened to the network. Under torchrun, Slurm or
another launcher the usual environment variables exist already. Then the ranks meet at
the address in these variables.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from hasten.errors import InputError, SameOnAllRanksError, StoppedError
from hasten.machine import environment
from hasten.machine.environment import World
from hasten.machine.processes import attempt_number

# Failed collectives. The messages of gloo and NCCL name no rank, only an address or a time limit.
# Each rank that gets such an error reports it in the store of the process group
# (:mod:`hasten.parts.comm.rank_check`). The message names the ranks without a report.

ANSWER_SECONDS = 5.0  # within which the other ranks report the same failure


class LinkError(StoppedError):
    """A rank has ended, hangs, or can't be reached."""

    code = 7


@contextlib.contextmanager
def naming_ranks(world: World) -> Iterator[None]:
    """Adds the missing ranks to the errors of collectives; for use inside a process group.

    Raises:
        LinkError: a collective failed.
    """
    if world.size == 1:
        yield
        return
    from hasten.parts.comm.rank_check import CollectiveError, RankReports, of_an_exchange

    reports = RankReports(f"run/{attempt_number()}", range(world.size), ANSWER_SECONDS)
    try:
        yield
    except CollectiveError as error:
        raise LinkError(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, StoppedError) or not of_an_exchange(error):
            raise
        raise LinkError(str(reports.failed("an exchange between ranks", error))) from error


# Start of a process group: (1) choose the backend for the device => (2) connect to rank 0 at the
# launcher's address => (3) store each rank's recipe, versions and data; rank 0 compares them, and
# all ranks end with the same message if two differ.
#
# Without (3) a rank with another batch size would wait in the first collective until its limit,
# and a rank with another learning rate would train another model without an error.

BACKENDS = ("auto", "gloo", "nccl")
NCCL = "cpu:gloo,cuda:nccl"  # gloo for tensors on the host: numbers, objects, barriers
ONE_EACH = "nccl needs a GPU for each rank; start no more ranks than GPUs, or set backend: gloo"


def backend_for(device: str, backend: str = "auto", ranks: int = 1) -> str:
    """Returns the backend of torch.distributed for a device.

    Args:
        device: type and number of the device.
        backend: one of ``BACKENDS``.
        ranks: number of the job's ranks on this machine.

    Raises:
        InputError: the backend is unknown, isn't part of this torch, can't use the device's
            memory, or NCCL would have two ranks on one GPU.
    """
    import torch.distributed as dist

    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}; it is one of {', '.join(BACKENDS)}")
    on_cpu = device.startswith("cpu")
    if backend == "gloo" or (backend == "auto" and on_cpu):
        return "gloo"
    if backend == "nccl" and on_cpu:
        raise InputError("backend: nccl moves a GPU's memory and this run is on cpu; set gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise InputError("backend: this torch was built without nccl; set gloo")
    gpus = max(1, torch.accelerator.device_count())
    # A launcher may make only one GPU visible to each rank; NCCL then finds two on the same one.
    if ranks > gpus and not (gpus == 1 and environment.is_shown_some_gpus()):
        raise InputError(f"{ranks} ranks here and {gpus} GPU(s): {ONE_EACH}")
    return NCCL


def join_process_group(
    world: World, backend: str, timeout: datetime.timedelta, device: str | torch.device = "cpu"
) -> None:
    """Connects to the other ranks and forms the default process group.

    Afterwards the rank's GPU is the current device of this thread. Objects, barriers and kernels
    without a device use it. Other threads begin with GPU 0.

    Raises:
        InputError: the address of rank 0 can't be reached or used, or two ranks have one GPU.
        LinkError: the same in a later attempt, in which the settings have worked before.
    """
    import torch.distributed as dist

    method, address = environment.meeting()
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
        kind = InputError if attempt_number() == 1 else LinkError
        raise kind(_no_meeting(world, address, timeout, error)) from error


def _no_meeting(world: World, address: str, timeout: datetime.timedelta, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "Duplicate GPU" in str(error):
        return f"rank {world.rank} has the GPU of another rank: {ONE_EACH}"
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return (
            f"rank {world.rank} can't listen at {address}, as another program does: end it, or set "
            "MASTER_PORT to a free port on all ranks"
        )
    return (
        f"rank {world.rank} of {world.size} didn't meet the others at {address} within "
        f"{timeout.total_seconds():g} s: {first[:200]}; see whether rank 0 runs there, and whether "
        "the port is free and open between the machines (MASTER_ADDR, MASTER_PORT)"
    )


def check_agreement(
    world: World, settings: Mapping[str, Mapping[str, Any]], subject: str = "start"
) -> None:
    """Checks that all ranks of the process group have the same settings.

    Args:
        settings: names and plain values, by topic (recipe, version, examples).
        subject: name of this comparison, unique in a run.

    Raises:
        SameOnAllRanksError: two ranks differ; every rank has the same message.
    """
    if world.size == 1:
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = dist.PrefixStore(f"hasten/agree/{subject}", _get_default_store())
    local_settings = json.dumps(
        {"host": socket.gethostname(), "settings": settings}, sort_keys=True, default=str
    )
    store.set(str(world.rank), local_settings)
    if world.is_main:
        reports = [json.loads(store.get(str(rank))) for rank in range(world.size)]
        store.set("verdict", _difference(reports))
    verdict = store.get("verdict").decode()
    store.set(f"read/{world.rank}", "")
    if world.is_main:  # this process serves the store, so it waits until the others have read
        store.wait([f"read/{rank}" for rank in range(world.size)])
    if verdict:
        raise SameOnAllRanksError(verdict)


def _difference(reports: list[dict[str, Any]]) -> str:
    """Returns a message on the first rank that differs from rank 0; empty if none differs."""
    ours = reports[0]["settings"]
    for rank, other in enumerate(reports):
        theirs = other["settings"]
        for topic in [*ours, *(set(theirs) - set(ours))]:
            one, two = ours.get(topic, {}), theirs.get(topic, {})
            keys = [k for k in [*one, *sorted(set(two) - set(one))] if one.get(k) != two.get(k)]
            if keys:
                more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
                return (
                    f"rank {rank} ({other['host']}) has another {topic} than rank 0 "
                    f"({reports[0]['host']}): {keys[0]} is {_short(two.get(keys[0]))} there and "
                    f"{_short(one.get(keys[0]))} on rank 0{more}; start all ranks with the same"
                )
    return ""


def _short(setting: Any) -> str:
    text = json.dumps(setting)
    return text if len(text) <= 80 else text[:77] + "..."


TIMEOUT = datetime.timedelta(minutes=10)


@contextlib.contextmanager
def process_group(
    world: World, device: str, timeout: datetime.timedelta = TIMEOUT, backend: str = "auto"
) -> Iterator[None]:
    """Context with the default process group; does nothing for a single rank.

    ``timeout`` limits how long a rank waits for the others, at the start and in a collective.
    Objects that use the group must be freed before it ends. Therefore create them in a function
    that is called inside the context.

    Raises:
        InputError: the ranks can't connect, or the backend can't use the device's memory.
    """
    import torch.distributed as dist

    if world.size == 1 or dist.is_initialized():
        yield
        return
    join_process_group(
        world, backend_for(device, backend, environment.ranks_here(world)), timeout, device
    )
    try:
        yield
    finally:
        # The last reference to a gloo group joins its threads when it is dropped. If DDP's reducer
        # holds that reference, it also holds the interpreter's lock. A thread that needs the lock
        # to free a tensor then waits forever (torch 2.13). So all users of the group are freed
        # before the group.
        gc.collect()
        dist.destroy_process_group()


def restart_with(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replaces this process by ``python -m hasten ARGUMENTS`` with these variables.

    The process keeps its number, terminal and signals (execve(2)). It doesn't restart again.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    variables = environment.child_environment({**variables, environment.STARTED_FOR_PLAN: "1"})
    os.execve(sys.executable, [sys.executable, "-m", "hasten", *arguments], variables)


def rank_environment(rank: int, count: int, folder: Path, threads: int) -> dict[str, str]:
    """Returns this process's environment with a rank's variables; ranks meet in ``folder``."""
    return environment.child_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            # Absolute: in file://a/b torch would take "a" for a host name.
            "HASTEN_RENDEZVOUS": str(folder.absolute() / "rendezvous"),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": str(threads),
        }
    )


def rank_variables(count: int, cores: int, folder: Path) -> list[dict[str, str]]:
    """Returns the variables that give each rank its number and meeting folder.

    These ranks may be stopped between two exchanges. They meet in the folder, which has to
    be new, and share the cores. A single rank needs no variables.
    """
    if count == 1:
        return [{}]
    # NCCL's monitor can't distinguish stopped ranks from ranks that hang.
    stopped = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    threads = max(1, cores // count)
    return [rank_environment(rank, count, folder, threads) | stopped for rank in range(count)]
