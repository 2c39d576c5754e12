"""FSDP and number formats of other trainers' files: what they say is what the recipe says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.recipe.importers import ImportedRecipe, read

ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "output_dir": "out",
    "num_train_epochs": 1,
}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "mixed_precision": "no"}
AXOLOTL = {"base_model": "m", "datasets": [], "micro_batch_size": 1, "sequence_len": 8}


def imported(folder: Path, given: dict[str, Any]) -> ImportedRecipe:
    path = folder / "config.json"
    path.write_text(json.dumps(given))
    return read(path)


def rows(found: ImportedRecipe) -> dict[str, tuple[str, str]]:
    return {row.key: (row.fate, row.explanation) for row in found.rows}


@pytest.mark.parametrize(
    ("words", "settings", "layout"),
    [
        ("full_shard auto_wrap", {"reshard": True}, None),
        (["shard_grad_op", "offload"], {"reshard": False, "offload": True}, None),
        (True, {"reshard": True}, None),
        ("hybrid_shard", None, "fsdp2"),
        ("no_shard", None, "ddp"),
        ("", None, None),
    ],
)
def test_words_of_fsdp_become_settings_of_fsdp2(
    tmp_path: Path, words: Any, settings: Any, layout: str | None
) -> None:
    found = imported(tmp_path, ARGUMENTS | {"fsdp": words})
    assert found.values.get("layout") == layout
    assert found.values.get("plan", []) == ([{"fsdp2": settings}] if settings else [])
    if words == "hybrid_shard":
        assert rows(found)["fsdp: hybrid_shard"][0] == "unmapped"


def test_every_key_of_a_block_has_its_row(tmp_path: Path) -> None:
    block = {
        "fsdp_sharding_strategy": 2,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_reshard_after_forward": True,
        "fsdp_something_new": 7,
    }
    given = ACCELERATE | {"distributed_type": "FSDP", "fsdp_config": block}
    found = imported(tmp_path, given)
    assert found.values["plan"] == [
        {"fsdp2": {"reshard": False, "offload": True}},
        "activation_checkpointing",
    ]
    told = rows(found)
    assert {f"fsdp_config.{name}" for name in block} <= set(told)
    assert told["fsdp_config.fsdp_backward_prefetch"][0] == "needless"
    assert told["fsdp_config.fsdp_reshard_after_forward"][0] == "contradicts"
    assert told["fsdp_config.fsdp_something_new"][0] == "unmapped"
    off = imported(tmp_path, given | {"distributed_type": "MULTI_GPU"})
    assert rows(off)["fsdp_config"] == ("needless", "it is off")
    assert "plan" not in off.values


def test_axolotl_s_second_fsdp_needs_no_words(tmp_path: Path) -> None:
    block = {"reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    found = imported(tmp_path, AXOLOTL | {"fsdp_version": 2, "fsdp_config": block})
    assert {"fsdp2": {"reshard": False}} in found.values["plan"]
    assert "layout" not in found.values


@pytest.mark.parametrize(
    ("block", "fate", "words"),
    [
        ({"fp16": {"enabled": True}}, "mapped", "ds_config.json"),
        ({"bf16": {"enabled": True}}, "contradicts", "says bf16, which is kept"),
    ],
)
def test_the_number_format_of_a_deepspeed_file_is_kept(
    tmp_path: Path, block: dict[str, Any], fate: str, words: str
) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(block))
    given = ARGUMENTS | {"fp16": True, "deepspeed": "ds_config.json"}
    found = imported(tmp_path, given)
    assert "plan" not in found.values
    assert found.values["on_obstacle"] == "skip"
    assert rows(found)["fp16"][0] == fate
    assert words in rows(found)["fp16"][1]


def test_a_format_that_the_file_leaves_open_is_the_plan_s(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"fp16": {"enabled": "auto"}}))
    found = imported(tmp_path, ARGUMENTS | {"fp16": True, "deepspeed": "ds_config.json"})
    assert found.values["plan"] == [{"autocast": {"dtype": "fp16"}}]
    (tmp_path / "ds_config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        imported(tmp_path, ARGUMENTS | {"fp16": True, "deepspeed": "ds_config.json"})
