"""SkyPilot: a task for ``sky jobs launch``, which finds machines and replaces reclaimed ones.

SkyPilot copies the folder of the files and the work folder to every node. Checkpoints are in a
mounted bucket, since the machines' disks are temporary. Source: SkyPilot's pages
"Task YAML", "Distributed multi-node jobs" and "Managed jobs".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from hasten.errors import InputError
from hasten.launch.targets.job import MARK, Launch
from hasten.launch.targets.node import meeting_at, node_script

REMOTE_FOLDER = "~/hasten_launch"
FIRST = '"--rdzv-conf=is_host=$((SKYPILOT_NODE_RANK == 0))" "--local-addr=$HASTEN_ADDRESS"'
RUN = """\
HASTEN_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"
export HASTEN_ADDRESS
export HASTEN_HEAD="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}"
bash {place}/node.sh
"""
# If the image has no hasten, its wheel in the work folder is installed.
SETUP = "python3 -c 'import hasten' 2>/dev/null || python3 -m pip install ./hasten-*.whl\n"


def files(launch: Launch, folder: str, bucket: str = "/checkpoints") -> dict[str, str]:
    """Returns the task, the node's script and the recipe.

    ``folder`` is their folder on this machine.

    Raises:
        InputError: the accelerators aren't set.
    """
    if not launch.accelerator:
        raise InputError("--gpu: SkyPilot looks for machines by their devices: --gpu H100")
    devices = f"{launch.accelerator}:{launch.cloud.gpus_per_node}"
    resources: dict[str, Any] = {"accelerators": devices, "use_spot": launch.spot}
    resources["job_recovery"] = {
        "max_restarts_on_errors": launch.restarts,
        "recover_on_exit_codes": [75],
    }
    if launch.image:
        resources["image_id"] = f"docker:{launch.image}"
    storage = {"name": f"hasten-{launch.name}", "mode": "MOUNT_CACHED"}
    task: dict[str, Any] = {
        "name": launch.name,
        "num_nodes": launch.cloud.nodes,
        "resources": resources,
        "workdir": launch.workdir,
        "file_mounts": {REMOTE_FOLDER: folder, bucket: storage},
        "setup": SETUP,
        "run": RUN.format(port=launch.port, place=REMOTE_FOLDER),
    }
    # SkyPilot starts node.sh in the copied work folder, which has another path on the node.
    remote_launch = replace(launch, workdir=".")
    meeting = meeting_at(launch, launch.nodes, '"$HASTEN_HEAD"', launch.name, FIRST)
    return {
        "recipe.yaml": launch.recipe,
        "node.sh": node_script(remote_launch, meeting),
        "task.yaml": f"{MARK}: sky jobs launch task.yaml\n"
        + yaml.safe_dump(task, sort_keys=False, width=100),
    }
