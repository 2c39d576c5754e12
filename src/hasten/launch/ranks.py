"""Ranks of one job: their variables, how they meet, and the check that all do the same.

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

# An exchange that failed, told with the rank that it failed for.
#
# gloo and NCCL say "connection closed by peer", or that time is up, and an address. The ranks that
# see it report it in the store where they met (:mod:`hasten.parts.comm.rank_check`), and a rank
# without a report is named with its host.

ANSWER_SECONDS = 5.0  # others see the same failure within moments, or their own time limit


class LinkError(StoppedError):
    """A rank has ended, hangs, or can't be reached."""

    code = 7


@contextlib.contextmanager
def naming_ranks(world: World) -> Iterator[None]:
    """Inside a process group: an error of an exchange between ranks names those that are missing.

    Raises:
        LinkError: an exchange failed.
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


# Ranks join: they meet, and make sure before training that they are about to do the same.
#
# (1) the backend is chosen for the device, or refused => (2) rank 0 listens where the launcher says
# and the others come => (3) every rank leaves what it is about to do (recipe, versions, data) at
# the meeting place; rank 0 compares, and all ranks end with the same sentence where two differ.
#
# Without (3) a rank with another batch size waits in the first exchange until its time is up, and
# one with another learning rate trains another model in silence.

BACKENDS = ("auto", "gloo", "nccl")
NCCL = "cpu:gloo,cuda:nccl"  # what lies on the host (numbers, objects, barriers) needs no GPU
ONE_EACH = "nccl wants a GPU for each rank; start no more ranks than GPUs, or set backend: gloo"


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
        raise InputError("backend: nccl moves a GPU's memory and this run is on cpu; set gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise InputError("backend: this torch was built without nccl; set gloo")
    gpus = max(1, torch.accelerator.device_count())
    # A launcher may show each rank its own GPU alone; NCCL then notices two on the same one.
    if ranks > gpus and not (gpus == 1 and environment.is_shown_some_gpus()):
        raise InputError(f"{ranks} ranks here and {gpus} GPU(s): {ONE_EACH}")
    return NCCL


def join_process_group(
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
    """Make sure that all ranks are about to do the same; inside a process group.

    Args:
        settings: by topic (recipe, version, examples), names and plain values.
        subject: names this comparison; another for each in a run.

    Raises:
        SameOnAllRanksError: two ranks differ; the same sentence on every rank.
    """
    if world.size == 1:
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = dist.PrefixStore(f"hasten/agree/{subject}", _get_default_store())
    local_settings = json.dumps(
        {"host": socket.gethostname(), "said": settings}, sort_keys=True, default=str
    )
    store.set(str(world.rank), local_settings)
    if world.is_main:
        everyone = [json.loads(store.get(str(rank))) for rank in range(world.size)]
        store.set("verdict", _difference(everyone))
    verdict = store.get("verdict").decode()
    store.set(f"read/{world.rank}", "")
    if world.is_main:  # the meeting place goes with this process: the others read first
        store.wait([f"read/{rank}" for rank in range(world.size)])
    if verdict:
        raise SameOnAllRanksError(verdict)


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


# One process per rank.

TIMEOUT = datetime.timedelta(minutes=10)


@contextlib.contextmanager
def process_group(
    world: World, device: str, timeout: datetime.timedelta = TIMEOUT, backend: str = "auto"
) -> Iterator[None]:
    """The default process group for as long as the context lasts; nothing for a single rank.

    ``timeout`` bounds how long a rank waits for the others in an exchange, and to meet them.
    Build what uses the group in a function called inside, so that it is gone when the group goes.

    Raises:
        InputError: the ranks can't meet, or the backend can't reach the device's memory.
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
        # Whoever drops the last reference to a gloo group joins its threads. If that is DDP's
        # reducer it holds the interpreter's lock, which a thread may want for freeing a tensor, and
        # both wait for ever (torch 2.13). So what was built inside goes first; callers build it in
        # a function of its own.
        gc.collect()
        dist.destroy_process_group()


def restart_with(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become ``python -m hasten ARGUMENTS`` with these variables; it doesn't begin again itself.

    The process keeps its number, its terminal and its signals (execve(2)).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    variables = environment.child_environment({**variables, environment.STARTED_FOR_PLAN: "1"})
    os.execve(sys.executable, [sys.executable, "-m", "hasten", *arguments], variables)


def rank_environment(rank: int, count: int, folder: Path, threads: int) -> dict[str, str]:
    """This process's environment with a rank's place in it; ranks meet in the folder ``folder``."""
    return environment.child_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            # Absolute: in file://a/b torch takes a for the name of a host, and waits for it.
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
    # NCCL's monitor would take ranks that are stopped for ranks that hang.
    stopped = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    threads = max(1, cores // count)
    return [rank_environment(rank, count, folder, threads) | stopped for rank in range(count)]
