"""A ds_config.json is read as DeepSpeed means it, its "auto" filled, its contradictions told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.parts.distributed.deepspeed_config import (
    INSIDE,
    TOP,
    TrainerSettings,
    batch_sizes,
    check_keys,
    fill_auto,
    read_config,
    read_settings,
)
from zero_configs import ARTICLE, CODER

sizes = st.integers(1, 64)
BATCH = {
    "train": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "steps": "gradient_accumulation_steps",
}


def test_auto_values_follow_from_the_model_s_width_and_the_trainer() -> None:
    known = TrainerSettings(
        world=4, batch=64, micro_batch=8, clipping=0.5, learning_rate=3e-4, hidden=512, bf16=True
    )
    found = fill_auto(CODER, known)
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 512**2
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 512**2)
    assert zero["stage3_param_persistence_threshold"] == 5120
    assert [found[key] for key in BATCH.values()] == [64, 8, 2]
    assert found["gradient_clipping"] == 0.5
    assert found["optimizer"]["params"]["lr"] == 3e-4
    assert found["bf16"]["enabled"] is True
    assert found["fp16"]["enabled"] is False
    assert '"auto"' not in json.dumps(found)
    assert CODER["gradient_clipping"] == "auto", "the given one stays as it is"


@given(micro=sizes, steps=sizes, world=sizes, left=st.sampled_from(sorted(BATCH)))
def test_any_two_sizes_give_the_third(micro: int, steps: int, world: int, left: str) -> None:
    whole = {"train": micro * steps * world, "micro": micro, "steps": steps}
    said = {BATCH[name]: value for name, value in whole.items() if name != left}
    found = batch_sizes({**said, BATCH[left]: "auto"}, TrainerSettings(world=world))
    assert vars(found) == whole


@given(micro=sizes, steps=sizes, world=sizes, off=st.integers(-30, 30).filter(bool))
def test_three_sizes_that_do_not_multiply_are_refused(
    micro: int, steps: int, world: int, off: int
) -> None:
    train = micro * steps * world + off
    if train < 1:
        return
    config = dict(zip(BATCH.values(), (train, micro, steps), strict=True))
    with pytest.raises(ValueError, match=f"train_batch_size is {train}"):
        batch_sizes(config, TrainerSettings(world=world))


ALONE = TrainerSettings()
TWO = TrainerSettings(world=2)


@pytest.mark.parametrize(
    ("config", "known", "words"),
    [
        ({"train_batch_size": 8}, TrainerSettings(batch=16), "is 8 and global_batch_size is 16"),
        ({BATCH["micro"]: 2}, TrainerSettings(micro_batch=4), "is 2 and micro_batch_size is 4"),
        (
            {BATCH["micro"]: 2, BATCH["steps"]: 4},
            TrainerSettings(world=2, batch=32),
            "the step has 32 examples, .* 2 x gradient_accumulation_steps 4 x 2 rank",
        ),
        ({"train_batch_size": 0}, ALONE, "train_batch_size is 0; it must be a number from 1"),
        ({"train_batch_size": "8"}, ALONE, "is '8'"),
        ({"train_batch_size": 9, BATCH["micro"]: 2}, TWO, "can't be dealt to 2 rank"),
    ],
)
def test_sizes_that_contradict_the_trainer_are_one_sentence(
    config: dict[str, Any], known: TrainerSettings, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        batch_sizes(config, known)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimisation": {}}, "unknown key 'zero_optimisation' .did you mean 'zero_opt"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; it is 0, 1, 2 or 3"),
        ({"zero_optimization": {"offload_param": {"devce": "cpu"}}}, "did you mean 'device'"),
        ({"zero_optimization": 3}, "must be a JSON object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ({"bf16": {"enabled": "yes"}}, "it is true, false or auto"),
    ],
)
def test_what_deep_speed_does_not_know_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_keys(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "holds a list, expected an object"), (None, "No such file")],
)
def test_a_file_that_is_none_is_one_sentence(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_config(file)


def test_an_auto_that_nothing_decides_is_named() -> None:
    with pytest.raises(ValueError, match="nothing decides zero_optimization: sub_group_size"):
        fill_auto({"zero_optimization": {"sub_group_size": "auto"}}, TrainerSettings())


def test_sizes_of_a_width_that_is_not_known_are_not_zero() -> None:
    with pytest.raises(ValueError, match="nothing decides zero_optimization: reduce_bucket_size"):
        fill_auto({"zero_optimization": {"reduce_bucket_size": "auto"}}, TrainerSettings())


@pytest.mark.parametrize(("on", "words"), [(False, "off"), (True, "bf16_master_weights")])
def test_bf16_under_its_old_name_is_read_alike(on: bool, words: str) -> None:
    found = read_settings({"bfloat16": {"enabled": on}}, TrainerSettings())
    assert found.precision == ("bf16" if on else None)
    assert [row.explanation for row in found.rows] == [words]
    with pytest.raises(ValueError, match="bfloat16: unknown key 'enabld'"):
        check_keys({"bfloat16": {"enabld": True}})


@pytest.mark.parametrize("config", [ARTICLE, CODER], ids=["article", "coder"])
def test_published_configs_have_a_row_for_every_key_and_none_refused(
    config: dict[str, Any],
) -> None:
    found = read_settings(config, TrainerSettings(world=2))
    assert found.stage == 3
    assert found.offload
    assert found.refused == ()
    named = {row.key.split(".")[0] for row in found.rows}
    assert named == set(config)
    assert {f"zero_optimization.{key}" for key in config["zero_optimization"]} <= {
        row.key for row in found.rows
    }
    assert found.precision == ("fp16" if config is ARTICLE else None)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer"),
        ({"optimizer": {"type": "OneBitAdam"}}, "type"),
        ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, "params"),
        ({"scheduler": {"type": "OneCycle"}}, "type"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale"),
    ],
)
def test_what_would_compute_something_else_is_refused(config: dict[str, Any], key: str) -> None:
    assert [row.key.split(".")[-1] for row in read_settings(config, TrainerSettings()).refused] == [
        key
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"elasticity": {"enabled": False}},
        {"sparse_gradients": False},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}},
        {"fp16": {"enabled": False, "loss_scale": 128}},
    ],
)
def test_what_is_switched_off_is_refused_nowhere(config: dict[str, Any]) -> None:
    assert read_settings(config, TrainerSettings()).refused == ()


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_keys_are_deep_speed_s_own() -> None:
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    def names(model: Any) -> set[str]:
        fields = model.model_fields
        return {*fields, *(field.alias for field in fields.values() if field.alias)}

    assert names(DeepSpeedZeroConfig) <= set(INSIDE["zero_optimization"])
    assert names(precision_config.DeepSpeedFP16Config) <= set(INSIDE["fp16"])
    assert names(precision_config.DeepSpeedBF16Config) <= set(INSIDE["bf16"])
    assert set(INSIDE) <= set(TOP)


def test_keys_inside_an_offload_have_rows_of_their_own() -> None:
    inner = {"device": "cpu", "pin_memory": True, "ratio": 1.0, "buffer_count": 4}
    found = read_settings(
        {"zero_optimization": {"stage": 3, "offload_optimizer": inner}}, TrainerSettings()
    )
    rows = {row.key.rpartition("offload_optimizer.")[2]: row for row in found.rows}
    assert set(inner) <= set(rows)
    assert rows["pin_memory"].fate == "honoured"
    assert "not needed on a processor" in rows["pin_memory"].explanation
    off = read_settings(
        {"zero_optimization": {"offload_param": {"pin_memory": False}}}, TrainerSettings()
    )
    assert [row.fate for row in off.rows if row.key.endswith("pin_memory")] == ["ignored"]
