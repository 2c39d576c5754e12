"""accelerate's YAML (``accelerate config``): how processes start, and in which number format."""

from __future__ import annotations

from typing import Any

from hasten.recipe.importers import sharding
from hasten.recipe.importers.draft import (
    Handler,
    RecipeDraft,
    drafted,
    half,
    table,
    unmapped,
)

NAME = "accelerate"
MARKS = ("compute_environment", "distributed_type", "num_machines", "mixed_precision")


def draft_of(given: dict[str, Any], ranks: int) -> RecipeDraft:
    return drafted(given, KEYS)


def precision(draft: RecipeDraft, key: str, value: Any) -> None:
    if value in ("bf16", "fp16"):
        half(str(value))(draft, key, True)
    elif value == "fp8":
        draft.use(key, "float8")


def kind(draft: RecipeDraft, key: str, value: Any) -> None:
    if value == "FSDP":
        draft.say(key, "layout", "fsdp2")
    elif value in ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", None):
        draft.note(key, "mapped", "replicas (ddp) where the plan names no layout")
    else:
        draft.note(key, "unmapped", f"there is no layout for {value!r}")


def machines(draft: RecipeDraft, key: str, value: Any) -> None:
    if int(value or 1) > 1:
        draft.note(key, "unmapped", "several hosts are started by `hasten launch`")
    else:
        draft.note(key, "needless", "this machine")


def deepspeed(draft: RecipeDraft, key: str, value: Any) -> None:
    found = value.get("deepspeed_config_file") if isinstance(value, dict) else None
    if found:
        draft.say(key, "deepspeed", str(found))
    elif value:
        words = "write it as a ds_config.json and name that file as `deepspeed`"
        draft.note(key, "unmapped", words)


def dynamo(draft: RecipeDraft, key: str, value: Any) -> None:
    backend = value.get("dynamo_backend") if isinstance(value, dict) else value
    if backend and str(backend).upper() != "NO":
        draft.use(key, "compiled")


KEYS: dict[str, Handler] = table("accelerate") | {
    "distributed_type": kind,
    "num_machines": machines,
    "mixed_precision": precision,
    "use_cpu": lambda d, k, v: d.say(k, "device", "cpu") if v else d.note(k, "needless", "off"),
    "fsdp_config": sharding.config(lambda given: given.get("distributed_type") == "FSDP"),
    "deepspeed_config": deepspeed,
    "dynamo_backend": dynamo,
    "dynamo_config": dynamo,
    "tpu_env": unmapped("hasten has no TPUs", off=(None, False, [])),
}
