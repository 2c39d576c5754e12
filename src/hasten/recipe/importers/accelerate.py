"""accelerate's YAML (``accelerate config``): process start, layout and number format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.recipe.importers import sharding, training
from hasten.recipe.importers.draft import (
    Handler,
    RecipeDraft,
    drafted,
    is_off,
    table,
    unmapped,
    whole_number,
)

NAME = "accelerate"
MARKS = (
    *("compute_environment", "distributed_type", "num_machines", "mixed_precision"),
    *("downcast_bf16", "main_training_function", "rdzv_backend", "machine_rank"),
)


def draft_of(draft: RecipeDraft, ranks: int) -> RecipeDraft:
    return drafted(draft, KEYS)


def precision(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting in ("bf16", "fp16"):
        training.half(str(setting))(draft, key, True)
    elif setting == "fp8":
        draft.use(key, "float8")


def kind(draft: RecipeDraft, key: str, setting: Any) -> None:
    if setting == "FSDP":
        draft.say(key, "layout", "fsdp2")
    elif setting in ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", None):
        draft.note(key, "mapped", "replicas (ddp) where the plan names no layout")
    else:
        draft.note(key, "unmapped", f"there is no layout for {setting!r}")


def machines(draft: RecipeDraft, key: str, setting: Any) -> None:
    if int(setting or 1) > 1:
        draft.note(key, "unmapped", "several hosts are started by `hasten launch`")
    else:
        draft.note(key, "needless", "this machine")


# Inline keys of ``deepspeed_config``, which accelerate turns into a ds_config.json.
INLINE = {"gradient_accumulation_steps", "gradient_clipping"}
ZERO_KEYS = {
    "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save",
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
}
STARTS = (
    *("deepspeed_multinode_launcher", "deepspeed_hostfile", "zero3_init_flag"),
    *("deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "offload_optimizer_nvme_path"),
    *("offload_param_nvme_path", "deepspeed_moe_layer_cls_names"),
)


def deepspeed(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps the DeepSpeed file, or inline settings to those of such a file."""
    if not isinstance(setting, Mapping) or draft.source.get("distributed_type") != "DEEPSPEED":
        draft.note(key, "needless", "it is off")
        return
    if config_file := setting.get("deepspeed_config_file"):
        training.deepspeed(draft, key, str(config_file))
        return
    zero: dict[str, Any] = {"stage": whole_number(setting.get("zero_stage", 2))}
    config: dict[str, Any] = {}
    for name, part_setting in setting.items():
        if name in INLINE and part_setting not in (None, "auto"):
            config[name] = (
                whole_number(part_setting) if name != "gradient_clipping" else float(part_setting)
            )
        elif name in ZERO_KEYS and not is_off(part_setting):
            zero[ZERO_KEYS[name]] = (
                part_setting if part_setting is True else {"device": part_setting}
            )
        elif name not in {*ZERO_KEYS, *INLINE, *STARTS, "zero_stage"} and not is_off(part_setting):
            draft.row(f"{key}.{name}", part_setting, "unmapped", "hasten doesn't know this key")
    draft.say(key, "deepspeed", {**config, "zero_optimization": zero})


def mesh(draft: RecipeDraft, key: str, setting: Any) -> None:
    """Maps ``parallelism_config``: replicas and shards to a layout; reports other sizes."""
    sizes = {
        str(name).removeprefix("parallelism_config_"): whole_number(part_setting)
        for name, part_setting in (setting or {}).items()
        if str(name).endswith("_size") and whole_number(part_setting) > 1
    }
    shard, copies = sizes.pop("dp_shard_size", 1), sizes.pop("dp_replicate_size", 1)
    tensor = sizes.pop("tp_size", 1)
    if tensor > 1:
        names = {"dp": copies, "shard": shard, "tp": tensor}
        draft.values.pop("layout", None)
        draft.say(key, "layout", {name: size for name, size in names.items() if size > 1})
    elif copies > 1 and shard > 1:
        draft.values.pop("layout", None)
        draft.plan.append({"fsdp2": {"replicas": copies}})
        draft.note(key, "mapped", f"plan: fsdp2: replicas: {copies}")
    elif shard > 1:
        draft.say(key, "layout", "fsdp2")
    for name, size in sizes.items():
        draft.row(f"{key}.{name}", size, "unmapped", "there is no such layout")


def float8(draft: RecipeDraft, key: str, setting: Any) -> None:
    on = draft.source.get("mixed_precision") == "fp8" and not is_off(setting)
    explanation = "the technique float8 has its own settings" if on else "it is off"
    draft.note(key, "unmapped" if on else "needless", explanation)


def dynamo(draft: RecipeDraft, key: str, setting: Any) -> None:
    backend = setting.get("dynamo_backend") if isinstance(setting, dict) else setting
    if backend and str(backend).upper() != "NO":
        draft.use(key, "compiled")


KEYS: dict[str, Handler] = table("accelerate") | {
    "distributed_type": kind,
    "num_machines": machines,
    "mixed_precision": precision,
    "use_cpu": lambda d, k, v: d.say(k, "device", "cpu") if v else d.note(k, "needless", "off"),
    "fsdp_config": sharding.config(lambda settings: settings.get("distributed_type") == "FSDP"),
    "deepspeed_config": deepspeed,
    "parallelism_config": mesh,
    "fp8_config": float8,
    "gradient_clipping": training.clipping,
    "dynamo_backend": dynamo,
    "dynamo_config": dynamo,
    "tpu_env": unmapped("hasten has no TPUs", off=(None, False, [])),
}
