"""Files that start a job on a cluster.

Targets: plain hosts, Slurm, Kubernetes, SkyPilot.

    Launch (what, where, how long) -> one function per target -> {file: text} -> write

These functions submit nothing and run no user input. ``shlex.quote`` quotes texts in shell
scripts, and ``yaml`` those in YAML files. Names that a scheduler reads are checked.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hasten.errors import InputError
from hasten.formatting import did_you_mean
from hasten.launch.targets import kubernetes, node, skypilot, slurm
from hasten.launch.targets.job import MARK, TARGETS, Launch
from hasten.machine.files import replacing

__all__ = ["TARGETS", "Launch", "files", "submission", "write"]


def files(target: str, launch: Launch, folder: Path) -> dict[str, str]:
    """Returns the texts by file name; ``folder`` is their later folder.

    Raises:
        InputError: an unknown target, or a setting that the target needs is missing.
    """
    if target not in TARGETS:
        hint = did_you_mean(target, TARGETS)
        raise InputError(f"--target {target!r}{hint}: it is one of {', '.join(TARGETS)}")
    absolute_folder = folder.absolute()
    if target == "torchrun":
        return node.files(launch)
    if target == "slurm":
        return slurm.files(launch, shlex.quote(str(absolute_folder / "node.sh")))
    if target == "kubernetes":
        return kubernetes.files(launch)
    return skypilot.files(launch, str(absolute_folder))


def submission(target: str, launch: Launch, folder: Path) -> list[str]:
    """Returns the arguments of the command that starts the job; empty if the user starts it."""
    absolute_folder = folder.absolute()
    if target == "torchrun" and launch.cloud.nodes == 1:
        return ["bash", str(absolute_folder / "node.sh")]
    if target == "torchrun" and launch.hosts:
        return ["bash", str(absolute_folder / "start.sh")]
    return {
        "slurm": ["sbatch", str(absolute_folder / "job.sbatch")],
        "kubernetes": ["kubectl", "apply", "-f", str(absolute_folder / "pytorchjob.yaml")],
        "skypilot": ["sky", "jobs", "launch", str(absolute_folder / "task.yaml")],
    }.get(target, [])


HEAD_BYTES = 4096  # size of the part of a file that is searched for hasten's mark


def write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Writes the files into ``folder``, creates it if needed, and returns the paths.

    Raises:
        InputError: a file of that name wasn't written by hasten, or the folder can't be
            written.
    """
    paths = [folder / name for name in files]
    for path in paths:
        if path.is_symlink() or (path.exists() and not _ours(path)):
            raise InputError(
                f"--output: {path} exists and wasn't written by hasten launch; name another "
                "folder, or move the file away"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            with replacing(path) as file:
                file.write(text.encode(errors="surrogateescape"))
            path.chmod(0o755 if text.startswith("#!") else 0o644)
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"--output: {folder} can't be written ({why}); name another folder"
        ) from error
    return paths


def _ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(HEAD_BYTES)
    except OSError:
        return False
