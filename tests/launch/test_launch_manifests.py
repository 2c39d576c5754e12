"""Manifests and arguments of a launch, against the fields that the schedulers' documents name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.launch.cluster import CloudConfig
from hasten.launch.targets import Launch, files, submission
from hasten.launch.targets.job import MARK

CLOUD = CloudConfig(4, 8, "fat_tree")
BASE = Launch(
    f"{MARK}\nmodel: x\n",
    CLOUD,
    name="job",
    fewest=2,
    spot=True,
    minutes=90,
    workdir="/work",
    image="registry/x:1",
    volume="claim",
    accelerator="H100",
    scheduler_options={"namespace": "team", "rdma": "rdma/hca"},
)
# Field -> type or fields below it; "*": any key. What isn't here isn't in the documents.
POD: dict[str, Any] = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "containers": [
        {
            "name": str,
            "image": str,
            "command": [str],
            "resources": {"limits": {"*": str}},
            "volumeMounts": [{"name": str, "mountPath": str}],
            "securityContext": {"capabilities": {"add": [str]}},
        }
    ],
    "volumes": [
        {
            "name": str,
            "configMap": {"name": str},
            "persistentVolumeClaim": {"claimName": str},
            "emptyDir": {"medium": str},
        }
    ],
    "tolerations": [{"key": str, "operator": str}],
}
HEAD: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
}
KINDS: dict[str, Any] = {
    "ConfigMap": {**HEAD, "data": {"*": str}},
    "PyTorchJob": {
        **HEAD,
        "spec": {
            "nprocPerNode": str,
            "runPolicy": {"cleanPodPolicy": str, "activeDeadlineSeconds": int},
            "elasticPolicy": {
                "rdzvBackend": str,
                "rdzvPort": int,
                "minReplicas": int,
                "maxReplicas": int,
                "maxRestarts": int,
            },
            "pytorchReplicaSpecs": {
                "Worker": {"replicas": int, "restartPolicy": str, "template": {"spec": POD}}
            },
        },
    },
}
SKY: dict[str, Any] = {
    "name": str,
    "num_nodes": int,
    "resources": {
        "accelerators": str,
        "use_spot": bool,
        "image_id": str,
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
    },
    "workdir": str,
    "file_mounts": {"~/hasten_launch": str, "/checkpoints": {"name": str, "mode": str}},
    "setup": str,
    "run": str,
}


def fits(value: Any, shape: Any, place: str = "") -> None:
    """Fail at the first field that the shape doesn't have."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), place
        for key, inner in value.items():
            assert key in shape or "*" in shape, f"{place}.{key}"
            fits(inner, shape.get(key, shape.get("*")), f"{place}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), place
        for inner in value:
            fits(inner, shape[0], f"{place}[]")
    else:
        assert type(value) is shape, f"{place} is {value!r}"


def manifests(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("spot", [True, False])
def test_manifests_have_documented_fields_only(spot: bool) -> None:
    found = manifests(
        files("kubernetes", replace(BASE, spot=spot), Path("/out"))["pytorchjob.yaml"]
    )
    assert found[0]["kind"] == "ConfigMap"
    for each in found:
        fits(each, KINDS[each["kind"]], each["kind"])
        assert each["metadata"] == {"name": "job", "namespace": "team"}


@given(recipe=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_whatever_the_recipe_says_reaches_the_config_map_as_it_is(recipe: str) -> None:
    printable = "".join(c for c in recipe if c.isprintable() or c in "\n\t")
    launch = replace(BASE, recipe=printable)
    found = manifests(files("kubernetes", launch, Path("/out"))["pytorchjob.yaml"])
    assert found[0]["data"]["recipe.yaml"] == printable
    assert len(found) == 2


def test_a_pod_that_was_asked_to_leave_ends_with_a_code_that_is_worth_a_restart() -> None:
    found = manifests(files("kubernetes", BASE, Path("/out"))["pytorchjob.yaml"])
    assert "code=143" in found[0]["data"]["node.sh"]
    assert found[1]["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert "--rdzv" not in found[0]["data"]["node.sh"]  # the operator says where


def test_a_skypilot_task_has_documented_fields_only() -> None:
    texts = files("skypilot", replace(BASE, workdir="/home/a b"), Path("/out"))
    task = yaml.safe_load(texts["task.yaml"])
    fits(task, SKY)
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["workdir"] == "/home/a b"
    assert "cd -- . ||" in texts["node.sh"]


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        ("kubernetes", {"image": ""}, "--image"),
        ("kubernetes", {"volume": ""}, "--volume"),
        ("kubernetes", {"workdir": "here"}, "absolute path"),
        ("kubernetes", {"name": "7b"}, "a letter first"),
        ("skypilot", {"accelerator": ""}, "--gpu"),
        ("slurm", {"grace": 80_000, "minutes": 9000}, "65535 seconds before the limit at most"),
    ],
)
def test_what_a_target_needs_is_asked_for(target: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        files(target, replace(BASE, **changes), Path("/out"))


def test_a_submission_is_words_and_never_a_line_of_shell() -> None:
    place = Path("/a b; $(x)")
    assert submission("slurm", BASE, place) == ["sbatch", "/a b; $(x)/job.sbatch"]
    assert submission("kubernetes", BASE, place)[:3] == ["kubectl", "apply", "-f"]
    assert submission("torchrun", BASE, place) == []  # nobody knows the hosts
