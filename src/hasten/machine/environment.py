"""Environment variables: the rank of this process, and settings for it and its children.

The launcher of a process (torchrun, Slurm, MPI) sets its rank:

| launcher | rank, ranks, rank on this machine | meeting place |
|---|---|---|
| torchrun, deepspeed, hasten | RANK, WORLD_SIZE, LOCAL_RANK | MASTER_ADDR, MASTER_PORT |
| srun | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID | first of the node list, port by job |
| Open MPI | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK | this machine, or MASTER_ADDR |
| MVAPICH | MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK | the same |
| MPICH, Intel MPI | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID | the same |

MASTER_ADDR and MASTER_PORT have priority if they are set. No other module reads
``os.environ``.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hasten.errors import InputError

PORT = 29500  # torch.distributed's default
JOB_PORTS = 20_000, 10_000  # first port and number of ports, one of which a Slurm job's id chooses
LOOPBACK = "127.0.0.1"
# oneDNN compiles a product for each shape, and torch stores 1,024 of each kind. Packed rows rarely
# have the same length twice, so most stored ones aren't used again: 1.1 GB in the demo's training.
COMPILED_PRODUCTS = {"LRU_CACHE_CAPACITY": "128"}
# An idle thread of GNU's OpenMP library polls 300,000 times before it sleeps (GOMP_SPINCOUNT in the
# manual). On busy cores the polling takes time from threads with work. benchmarks/results/cpu.md
# has figures for 10,000 times.
BRIEF_WAITING = {"GOMP_SPINCOUNT": "10000"}
WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # the user's own values have priority
# Variables of each launcher: rank, ranks, rank on this machine, ranks on this machine
LAUNCHERS: Mapping[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class RankPlace:
    """This process's position among those that were started together."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None: unknown


def place_of(environ: Mapping[str, str]) -> RankPlace | None:
    """Returns the position from a launcher's variables; None without a launcher.

    Raises:
        InputError: a variable isn't a number, or the rank isn't one of the ranks.
    """
    for launcher, (rank, size, local, local_size) in LAUNCHERS.items():
        if rank not in environ or size not in environ:
            continue
        # A script of sbatch has the variables of a rank 0 without being one. Only srun, which
        # starts ranks, sets a step's number (man srun, OUTPUT ENVIRONMENT VARIABLES).
        is_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
        if launcher == "Slurm" and "SLURM_JOB_ID" in environ and not is_step:
            continue
        count = environ.get("SLURM_STEP_NUM_TASKS", environ[size])
        ranks = _number(size, count if launcher == "Slurm" else environ[size])
        rank_place = RankPlace(
            launcher,
            _number(rank, environ[rank]),
            ranks,
            _number(local, environ.get(local, environ[rank])),
            _local_size(launcher, environ.get(local_size), ranks),
        )
        if not 0 <= rank_place.rank < rank_place.size:
            raise InputError(
                f"{rank} is {rank_place.rank} and {size} is {rank_place.size}: no such rank"
            )
        return rank_place
    return None


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise InputError(f"{name} is {value!r}; it must be a number") from None


def _local_size(launcher: str, value: str | None, ranks: int) -> int | None:
    if value is None or not value.isdigit():
        return None
    # Slurm reports the requested number, which may be larger than the actual one.
    return min(int(value), ranks) if launcher == "Slurm" else int(value)


def meeting_place(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns host and port where the first rank listens.

    Raises:
        InputError: no variable names the host of the first rank.
    """
    rank_place = place_of(environ)
    port = environ.get("MASTER_PORT")
    if port is not None:
        number = _number("MASTER_PORT", port)
        if not 0 < number < 1 << 16:
            raise InputError(f"MASTER_PORT is {number}; it must be from 1 to 65535")
    else:
        job = (
            environ.get("SLURM_JOB_ID", "") if rank_place and rank_place.launcher == "Slurm" else ""
        )
        first, count = JOB_PORTS
        number = first + int(job) % count if job.isdigit() else PORT
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], number
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if rank_place is not None and rank_place.launcher == "Slurm" and nodes:
        return first_node(nodes), number
    if rank_place is None or rank_place.local_size in (None, rank_place.size):
        return LOOPBACK, number
    raise InputError(
        f"{rank_place.launcher} started {rank_place.size} ranks, {rank_place.local_size} of them "
        "here, without the address of the first one: set MASTER_ADDR to its machine"
    )


def meeting_method(environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the meeting place as torch.distributed's init_method, and as text for messages."""
    file = environ.get("HASTEN_RENDEZVOUS")  # set for ranks that hasten started on this machine
    if file is not None:
        return f"file://{file}", file
    host, port = meeting_place(environ)
    both = f"{host}:{port}"
    # torchrun's agent may already listen there, which env:// handles.
    from_environment = "MASTER_ADDR" in environ and "MASTER_PORT" in environ
    return ("env://" if from_environment else f"tcp://{both}"), both


def first_node(nodes: str) -> str:
    """Returns the first host of Slurm's list: ``gpu[07-12,15],login1`` begins with ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodes.strip())
    if match is None:
        raise InputError(f"SLURM_JOB_NODELIST is {nodes!r}; set MASTER_ADDR to the first machine")
    before, numbers, after = match.groups()
    return before + (re.split(r"[,-]", numbers)[0] if numbers else "") + (after or "")


# Variables of this process and of its children

STARTED_FOR_PLAN = "HASTEN_STARTED_FOR_PLAN"  # set in a process that was restarted for its plan
PARENT = "HASTEN_SUPERVISOR"  # process that started a rank and waits for it


@dataclass(frozen=True)
class World:
    """This process among the ranks of the job."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world() -> World:
    """Returns the rank from torchrun, Slurm, MPI or hasten's own starter."""
    rank_place = place_of(os.environ)
    return World(rank_place.rank, rank_place.local_rank, rank_place.size) if rank_place else World()


def meeting() -> tuple[str, str]:
    """Returns `meeting_method` from the variables of this process."""
    return meeting_method(os.environ)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment with ``extra`` added, for a new process."""
    return {**defaults({**os.environ, **extra}), **os.environ, **extra}


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for a process that computes, except those that the user has set.

    Torch stores few compiled products, and idle threads wait briefly before they sleep.
    """
    waits = any(name in environ for name in WAITING_VARIABLES)
    return {**COMPILED_PRODUCTS, **({} if waits else BRIEF_WAITING)}


def use_defaults() -> None:
    """Sets `defaults` for this process; call it before torch is imported, which reads them."""
    for name, value in defaults(os.environ).items():
        os.environ.setdefault(name, value)
    # A thread of autograd starts without a CUDA context, and torch then creates one.
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA")


def take_over(variables: Mapping[str, str]) -> None:
    """Adds variables to this process's environment."""
    os.environ.update(variables)


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables inside for this process and its children."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def variable(name: str) -> str | None:
    """Returns a variable of this process's environment; None if it isn't set."""
    return os.environ.get(name)


def started_by_hasten() -> bool:
    """Returns True if this is a rank that hasten's own process started and waits for."""
    return variable(PARENT) is not None


def positive_number(name: str, advice: str) -> int | None:
    """Returns a variable as a whole number above 0; None if it is absent or empty.

    Raises:
        InputError: the variable is something else; ``advice`` ends the message.
    """
    text = os.environ.get(name)
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or int(text) == 0:
        raise InputError(f"{name} is {text[:60]!r}, expected a whole number above 0; {advice}")
    return int(text)


def not_yet_so(wanted: Mapping[str, str]) -> dict[str, str]:
    """Returns those of the ``wanted`` variables for which this process must be restarted.

    The result is empty in a process that was restarted already, so there is no second restart.
    """
    if STARTED_FOR_PLAN in os.environ:
        return {}
    return {k: v for k, v in wanted.items() if os.environ.get(k) != v}


def is_shown_some_gpus() -> bool:
    """Returns True if a variable hides GPUs of this machine from this process."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return any(name in os.environ for name in names)


def ranks_here(world: World) -> int:
    """Returns the launcher's number of ranks on this machine; all ranks if it isn't set."""
    rank_place = place_of(os.environ)
    return max(1, rank_place.local_size or rank_place.size) if rank_place else world.size


def isa_variable() -> str:
    """Returns oneDNN's limit of instruction sets from the environment; "" if there is none."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "")
