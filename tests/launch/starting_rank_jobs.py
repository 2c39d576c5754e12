"""What test_starting runs on two ranks: meeting under each launcher's variables, and agreeing."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from hasten.errors import InputError
from hasten.launch.ranks import check_agreement, process_group
from hasten.machine import environment

NAMES = {
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


def variables(launcher: str, rank: int, port: int) -> dict[str, str]:
    """What the launcher would set for one of two ranks on this machine."""
    values = [str(rank), "2", str(rank), "2"]
    found = dict(zip(NAMES[launcher], values, strict=False))
    if launcher == "Slurm":
        more = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
        found |= {**more, "MASTER_PORT": str(port)}
    elif launcher == "torchrun":
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    else:
        found["MASTER_PORT"] = str(port)
    return {**found, "GLOO_SOCKET_IFNAME": "lo"}


def meet(rank: int, ports: dict[str, int]) -> dict[str, Any]:
    """The sum of both ranks' numbers under each launcher, and what differences are said to be."""
    found: dict[str, Any] = {}
    for launcher, port in ports.items():
        mine = variables(launcher, rank, port)
        os.environ.update(mine)
        world = environment.world()
        with process_group(world, "cpu", timedelta(seconds=120)):
            total = torch.tensor([world.rank + 1.0])
            torch.distributed.all_reduce(total)
            found[launcher] = [total.item(), environment.ranks_here(world)]
            if launcher == "torchrun":
                found["said"] = _differences(rank)
        for name in mine:
            del os.environ[name]
    return found


def _differences(rank: int) -> list[str]:
    same = {"recipe": {"seed": 0}, "version": {"torch": "2.13"}}
    check_agreement(environment.world(), same)
    return [
        _words({**same, "recipe": {"seed": 0, "learning_rate": 0.1 * rank}}, "one"),
        _words({**same, "version": {"torch": f"2.{13 - rank}"}}, "two"),
    ]


def _words(said: dict[str, dict[str, Any]], subject: str) -> str:
    try:
        check_agreement(environment.world(), said, subject)
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, answers = int(sys.argv[1]), meet(int(sys.argv[1]), json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(answers))
