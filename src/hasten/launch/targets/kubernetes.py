"""Kubernetes: a job as PyTorchJob (Kubeflow Training Operator).

Recipe and ``node.sh`` are in a ConfigMap. Data, results and checkpoints are on a claim
that is mounted at the work folder. The operator passes the meeting place to torchrun in
PET_ variables. A pod that received a stop signal ends with 143. PyTorchJob's policy
``ExitCode`` restarts on codes of 128 and above, and on a lost node; 1 to 127 end the
job.

Source: kubeflow.org's pages on PyTorchJob (elastic training, restart policies).
"""

from __future__ import annotations

from typing import Any

import yaml

from hasten.errors import InputError
from hasten.launch.targets.job import MARK, Launch
from hasten.launch.targets.node import node_script

PREEMPTED_CODE = 143  # 128 + SIGTERM
MOUNT = "/etc/hasten"


def files(launch: Launch) -> dict[str, str]:
    """Returns the manifest, which holds recipe and script.

    Raises:
        InputError: no image, no claim for data and checkpoints, or an invalid name.
    """
    if not launch.image:
        raise InputError("--image: Kubernetes needs a container image that the cluster can pull")
    if not launch.volume:
        raise InputError(
            "--volume: name the claim (PersistentVolumeClaim, ReadWriteMany) that holds data and "
            "checkpoints; pods keep nothing"
        )
    if not launch.name[0].isalpha():
        raise InputError(
            f"--name {launch.name!r}: Kubernetes requires a letter first, since services "
            "have the job's name (RFC 1035)"
        )
    if not launch.workdir.startswith("/"):
        raise InputError(
            f"--workdir {launch.workdir!r}: the claim needs an absolute path to be mounted at"
        )
    # node.sh is PID 1 of the pod. The operator's variables have number of nodes and address.
    script = node_script(launch, "", PREEMPTED_CODE)
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(launch),
        "data": {"recipe.yaml": launch.recipe, "node.sh": script},
    }
    manifests = [config_map, _pytorch_job(launch)]
    shown = yaml.safe_dump_all(manifests, sort_keys=False, width=100, explicit_start=True)
    return {"pytorchjob.yaml": f"{MARK}: kubectl apply -f this file\n{shown}"}


def _metadata(launch: Launch) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": launch.name}
    if launch.scheduler_options.get("namespace"):
        metadata["namespace"] = launch.scheduler_options["namespace"]
    return metadata


def _pod(launch: Launch) -> dict[str, Any]:
    """Returns the specification of a pod of the job."""
    devices = {"nvidia.com/gpu": str(launch.cloud.gpus_per_node)}
    security: dict[str, Any] = {}
    tolerations: dict[str, Any] = {}
    if launch.spot:  # tolerates the taint of spot nodes
        keys = ("cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority")
        tolerations = {"tolerations": [{"key": key, "operator": "Exists"} for key in keys]}
    if launch.scheduler_options.get("rdma"):
        devices[launch.scheduler_options["rdma"]] = "1"
        security = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}  # pinned buffers
    mounts = [("scripts", MOUNT), ("work", launch.workdir), ("memory", "/dev/shm")]
    return {
        "terminationGracePeriodSeconds": launch.grace,
        "containers": [
            {
                "name": "pytorch",
                "image": launch.image,
                "command": ["bash", f"{MOUNT}/node.sh"],
                "resources": {"limits": devices},
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
                **security,
            }
        ],
        "volumes": [
            {"name": "scripts", "configMap": {"name": launch.name}},
            {"name": "work", "persistentVolumeClaim": {"claimName": launch.volume}},
            # NCCL and data loaders use shared memory; a container's default /dev/shm has 64 MB.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
        **tolerations,
    }


def _pytorch_job(launch: Launch) -> dict[str, Any]:
    policy: dict[str, Any] = {"cleanPodPolicy": "None"}
    if launch.minutes is not None:
        policy["activeDeadlineSeconds"] = launch.minutes * 60
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(launch),
        "spec": {
            "nprocPerNode": str(launch.cloud.gpus_per_node),
            "runPolicy": policy,
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "rdzvPort": launch.port,
                "minReplicas": launch.least,
                "maxReplicas": launch.cloud.nodes,
                "maxRestarts": launch.restarts,
            },
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": launch.cloud.nodes,
                    "restartPolicy": "ExitCode",
                    "template": {"spec": _pod(launch)},
                }
            },
        },
    }
