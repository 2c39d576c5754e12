"""Slurm: ``job.sbatch`` allocates nodes, runs ``node.sh`` on each, can be requeued.

    --signal=B:USR1@GRACE -> batch shell -> srun -> node.sh -> ranks save, end with 75

After such a signal, the batch shell handles the code 75:

    scontrol requeue -> the job resumes from its checkpoint

Slurm itself requeues lost nodes and preempted jobs (``--requeue``). Directives contain
only checked words; paths are quoted in the body.

Source: the manual pages of sbatch, srun (SIGNALS AND ESCAPE SEQUENCES) and scontrol.
"""

from __future__ import annotations

from hasten.errors import InputError
from hasten.launch.targets.job import MARK, Launch, script
from hasten.launch.targets.node import meeting_at, node_script

OPTIONS = ("partition", "account", "qos", "constraint", "reservation")
LONGEST_WARNING = 65_535  # seconds before the limit; the maximum of --signal
FIRST = '"--rdzv-conf=is_host=$((SLURM_NODEID == 0))" "--local-addr=$SLURMD_NODENAME"'


def files(launch: Launch, node: str) -> dict[str, str]:
    """Returns the batch script, the node's script and the recipe.

    ``node`` is the absolute path of node.sh, quoted for a shell: Slurm runs a copy of the batch
    script in another folder.

    Raises:
        InputError: Slurm can't send a signal so long before the limit.
    """
    if launch.grace > LONGEST_WARNING:
        raise InputError(
            f"--grace is {launch.grace}; Slurm warns {LONGEST_WARNING} seconds before the limit "
            "at most"
        )
    nodes = f'"{launch.least}:$SLURM_JOB_NUM_NODES"'
    if launch.least == launch.cloud.nodes:
        nodes = '"$SLURM_JOB_NUM_NODES"'
    meeting = meeting_at(launch, nodes, '"$HASTEN_HEAD"', '"$SLURM_JOB_ID"', FIRST)
    elastic = launch.least < launch.cloud.nodes
    body = script(
        "slurm_body",
        port=launch.port,
        node=node,
        loss="--no-kill --kill-on-bad-exit=0" if elastic else "--kill-on-bad-exit=1",
    )
    return {
        "recipe.yaml": launch.recipe,
        "node.sh": node_script(launch, meeting),
        "job.sbatch": "\n".join(_directives(launch)) + "\n" + body,
    }


def _directives(launch: Launch) -> list[str]:
    cloud, options = launch.cloud, []
    span = f"{launch.least}-{cloud.nodes}" if launch.least < cloud.nodes else str(cloud.nodes)
    options += [f"job-name={launch.name}", f"nodes={span}", "ntasks-per-node=1"]
    options += [f"gpus-per-node={cloud.gpus_per_node}", "exclusive", "mem=0"]
    if launch.minutes is not None:
        hours, minutes = divmod(launch.minutes, 60)
        options.append(f"time={hours}:{minutes:02d}:00")
    options += [f"signal=B:USR1@{launch.grace}", "requeue", "open-mode=append"]
    options.append("output=%x-%j.log")
    options += [
        f"{key}={launch.scheduler_options[key]}"
        for key in OPTIONS
        if launch.scheduler_options.get(key)
    ]
    head = ["#!/usr/bin/env bash", f"{MARK}: sbatch job.sbatch"]
    return [*head, *(f"#SBATCH --{option}" for option in options)]
