"""Manifests and arguments of a launch, against the fields that the schedulers' documents name."""

from __future__ import annotations

import re
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
from hasten.launch.targets.megatron import arguments
from hasten.models.presets import build_config, preset

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
    "TrainingRuntime": {
        **HEAD,
        "spec": {
            "mlPolicy": {"numNodes": int, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": int},
                    "replicatedJobs": [
                        {
                            "name": str,
                            "template": {
                                "metadata": {"labels": {"*": str}},
                                "spec": {"backoffLimit": int, "template": {"spec": POD}},
                            },
                        }
                    ],
                }
            },
        },
    },
    "TrainJob": {
        **HEAD,
        "spec": {
            "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
            "trainer": {"numNodes": int, "numProcPerNode": int},
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


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml"])
@pytest.mark.parametrize("spot", [True, False])
def test_manifests_have_documented_fields_only(name: str, spot: bool) -> None:
    found = manifests(files("kubernetes", replace(BASE, spot=spot), Path("/out"))[name])
    assert found[0]["kind"] == "ConfigMap"
    for each in found:
        fits(each, KINDS[each["kind"]], each["kind"])
        assert each["metadata"] == {"name": "job", "namespace": "team"}


@given(recipe=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_whatever_the_recipe_says_reaches_the_config_map_as_it_is(recipe: str) -> None:
    printable = "".join(c for c in recipe if c.isprintable() or c in "\n\t")
    launch = replace(BASE, recipe=printable)
    for text in files("kubernetes", launch, Path("/out")).values():
        found = manifests(text)
        assert found[0]["data"]["recipe.yaml"] == printable
        assert len(found) in (2, 3)


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
    assert submission("megatron", BASE, place) == []


LAYOUT: dict[str, Any] = {
    "dp": 4,
    "tp": 2,
    "pp": 4,
    "ep": 8,
    "cp": 1,
    "zero": 1,
    "micro_batch": 2,
    "virtual": 1,
    "schedule": "1f1b",
    "recompute": "full",
    "precision": "bf16",
    "compression": "none",
    "sequence_parallel": True,
}
BATCH: dict[str, Any] = {
    "sequence": 4096,
    "global_batch": 256,
    "steps": 10,
    "task": "full",
    "seed": 0,
    "learning_rate": 3e-4,
    "min_lr_ratio": 0.1,
    "lr_schedule": "cosine",
    "warmup_steps": 5,
    "adam_betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}


def told(name: str, **layout: Any) -> dict[str, tuple[str, ...]]:
    config = build_config(preset(name)).to_dict()
    lines = arguments(config, {**LAYOUT, **layout}, BATCH, 32)
    assert len({line[0] for line in lines}) == len(lines), "an argument is given twice"
    return {line[0]: line[1:] for line in lines}


def test_deepseek_v3_s_shape_becomes_megatron_s_arguments() -> None:
    found = told("deepseek-v3", pp=1, dp=16)
    assert found["--num-layers"] == ("61",)
    assert found["--q-lora-rank"] == ("1536",)
    assert found["--kv-lora-rank"] == ("512",)
    assert found["--qk-head-dim"] == ("128",)
    assert found["--qk-pos-emb-head-dim"] == ("64",)
    assert found["--num-experts"] == ("256",)
    assert found["--moe-layer-freq"] == ("([0]*3+[1]*58)",)
    assert found["--moe-shared-expert-intermediate-size"] == ("2048",)
    assert found["--moe-router-score-function"] == ("sigmoid",)
    assert found["--expert-model-parallel-size"] == ("8",)
    assert "--group-query-attention" not in found
    assert "--add-qkv-bias" not in found


def test_all_of_the_grace_is_left_for_saving() -> None:
    config = build_config(preset("deepseek-llm-7b")).to_dict()
    for grace, minutes in ((119, 88), (60, 89), (90 * 60 - 1, 1)):
        launch = replace(
            BASE, grace=grace, config=config, layout={**LAYOUT, "pp": 2, "dp": 8}, batch=BATCH
        )
        text = files("megatron", launch, Path("/out"))["megatron.sh"]
        assert f"--exit-duration-in-mins {minutes}\n" in text


def test_grouped_heads_and_biases_of_qwen_are_said() -> None:
    found = told("deepseek-r1-distill-qwen-7b")
    assert found["--num-query-groups"] == ("4",)
    assert "--add-qkv-bias" in found
    assert "--num-experts" not in found


def test_a_plan_s_split_becomes_arguments() -> None:
    found = told("deepseek-r1-distill-qwen-7b", virtual=7, schedule="interleaved")
    assert found["--tensor-model-parallel-size"] == ("2",)
    assert found["--pipeline-model-parallel-size"] == ("4",)
    assert found["--num-virtual-stages-per-pipeline-rank"] == ("7",)
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--bf16"} <= set(found)
    assert found["--recompute-granularity"] == ("full",)
    assert found["--min-lr"] == ("3e-05",)
    assert all(re.fullmatch(r"--[a-z0-9-]+", name) for name in found)


def test_light_recomputation_is_named_by_megatron_s_modules() -> None:
    found = told("deepseek-v3", pp=1, dp=16, recompute="light")
    assert found["--recompute-granularity"] == ("selective",)
    assert found["--recompute-modules"] == ("layernorm", "moe_act", "mla_up_proj")
    assert "--recompute-modules" not in told("deepseek-v3", pp=1, dp=16, recompute="selective")
    assert "--recompute-granularity" not in told("deepseek-v3", pp=1, dp=16, recompute="none")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"dp": 8}, "deals out 64 devices"),
        ({"zero": 3}, "ZeRO 3"),
        ({"schedule": "dualpipe"}, "no schedule 'dualpipe'"),
        ({"compression": "int8"}, "compressed"),
        ({"pp": 8, "dp": 2}, "28 layers"),
        ({"precision": "nvfp4"}, "nvfp4"),
        ({"recompute": "light"}, "for models with experts"),
    ],
)
def test_what_megatron_can_t_run_as_planned_is_refused(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        told("deepseek-r1-distill-qwen-7b", **layout)


def test_a_lora_and_an_unknown_family_are_refused() -> None:
    with pytest.raises(InputError, match="trains a LoRA"):
        arguments({"model_type": "llama"}, LAYOUT, {**BATCH, "task": "lora"}, 32)
    with pytest.raises(InputError, match="'gpt2' isn't one of"):
        arguments({"model_type": "gpt2"}, LAYOUT, BATCH, 32)
    with pytest.raises(InputError, match="lacks 'num_attention_heads'"):
        arguments({"model_type": "llama"}, LAYOUT, BATCH, 32)
