"""Which files each target gets, and the one command that would submit them."""

from __future__ import annotations

import shlex
from pathlib import Path

from hasten.core.plan import did_you_mean
from hasten.errors import InputError
from hasten.launch.targets import kubernetes, megatron, skypilot, slurm, torchrun
from hasten.launch.targets.job import TARGETS, Launch


def files(target: str, launch: Launch, folder: Path) -> dict[str, str]:
    """The texts by file name; ``folder`` is where they will lie.

    Raises:
        InputError: an unknown target, or something that it needs wasn't said.
    """
    place = folder.absolute()
    if target == "torchrun":
        return torchrun.files(launch)
    if target == "slurm":
        return slurm.files(launch, shlex.quote(str(place / "node.sh")))
    if target == "kubernetes":
        return kubernetes.files(launch)
    if target == "skypilot":
        return skypilot.files(launch, str(place))
    if target == "megatron":
        return megatron.files(launch)
    hint = did_you_mean(target, TARGETS)
    raise InputError(f"--target {target!r}{hint}: it is one of {', '.join(TARGETS)}")


def submission(target: str, launch: Launch, folder: Path) -> list[str]:
    """The words of the command that starts the job; empty where a person has to.

    None of them is read by a shell.
    """
    place = folder.absolute()
    if target == "torchrun" and launch.cloud.nodes == 1:
        return ["bash", str(place / "node.sh")]
    if target == "torchrun" and launch.hosts:
        return ["bash", str(place / "start.sh")]
    return {
        "slurm": ["sbatch", str(place / "job.sbatch")],
        "kubernetes": ["kubectl", "apply", "-f", str(place / "pytorchjob.yaml")],
        "skypilot": ["sky", "jobs", "launch", str(place / "task.yaml")],
    }.get(target, [])
