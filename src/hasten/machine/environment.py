"""Environment variables of this process and of those it starts: ranks, launchers, settings.

The only module that reads ``os.environ``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hasten.machine.launchers import meeting_method, place_of

STARTED_FOR_PLAN = "HASTEN_STARTED_FOR_PLAN"  # set in a process that began again for its plan


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
    """The rank that torchrun, Slurm, MPI or hasten's own starter gave this process."""
    found = place_of(os.environ)
    return World(found.rank, found.local_rank, found.size) if found else World()


def meeting() -> tuple[str, str]:
    """Where ranks find each other, as torch.distributed writes it, and in words."""
    return meeting_method(os.environ)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``extra`` on top, for a process to be started."""
    return {**os.environ, **extra}


def take_over(variables: Mapping[str, str]) -> None:
    """Go on with these variables, in a process that began before they were known."""
    os.environ.update(variables)


def variable(name: str) -> str | None:
    """A variable of this process's environment, for a technique that adds to it."""
    return os.environ.get(name)


def not_yet_so(wanted: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that this process wasn't started with.

    Empty in a process that was started once more for them: whatever is missing then stays so.
    """
    if STARTED_FOR_PLAN in os.environ:
        return {}
    return {k: v for k, v in wanted.items() if os.environ.get(k) != v}


def is_shown_some_gpus() -> bool:
    """Whether a variable hides GPUs of this machine from this process."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return any(name in os.environ for name in names)


def ranks_here(world: World) -> int:
    """Ranks on this machine: launchers say how many; all of them, where nobody does."""
    found = place_of(os.environ)
    return max(1, found.local_size or found.size) if found else world.size
