"""``deepspeed: FILE`` becomes keys and techniques; what contradicts the recipe is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.check import show_ds_config
from hasten.errors import InputError
from hasten.recipe.schema import Recipe, recipe_from
from zero_configs import ARTICLE, CODER

LEAST = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 2}
FP16 = {"autocast": {"dtype": "fp16", "initial_scale": 65536.0, "growth_interval": 1000}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ds_config.json"


def read(file: Path, config: dict[str, Any], **more: Any) -> Recipe:
    file.write_text(json.dumps(config))
    return recipe_from({**LEAST, "deepspeed": str(file), **more}, "recipe.yaml")


def test_the_articles_block_is_sharded_and_in_fp16(file: Path) -> None:
    found = read(file, ARTICLE, nproc=2)
    assert found.plan[0] == FP16
    assert found.plan[1]["fsdp2"]["reshard"] is True
    assert found.global_batch_size == 8
    assert found.deepspeed is None, "the resolved recipe needs the file no more"


def test_an_auto_config_leaves_the_recipe_its_values(file: Path) -> None:
    said = {"learning_rate": 1e-3, "global_batch_size": 16, "warmup_steps": 3}
    found = read(file, CODER, nproc=4, **said)
    assert {key: getattr(found, key) for key in said} == said
    assert found.lr_schedule == "constant"
    assert [next(iter(entry)) for entry in found.plan] == ["fsdp2"]


def test_numbers_of_the_file_become_keys(file: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.8, 0.999]},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 7, "warmup_max_lr": 1e-4},
        },
        "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": True},
        "zero_optimization": {"stage": 2},
    }
    found = read(file, config, nproc=2)
    assert found.global_batch_size == 16
    assert (found.learning_rate, found.weight_decay, found.max_grad_norm) == (1e-4, 0.1, 0.5)
    assert (found.lr_schedule, found.warmup_steps) == ("linear", 7)
    assert found.adam_betas == (0.8, 0.999)
    assert found.plan[:3] == [
        {"gradient_accumulation": {"micro_batch_size": 2}},
        "activation_checkpointing",
        "bf16_master_weights",
    ]
    assert found.plan[3]["fsdp2"]["reshard"] is False


def test_no_clipping_is_no_clipping(file: Path) -> None:
    assert read(file, {"gradient_clipping": 0}).max_grad_norm is None


def test_one_rank_has_nothing_to_deal_out(file: Path) -> None:
    assert read(file, CODER).plan == []


def test_a_resolved_recipe_reads_back_as_itself(file: Path) -> None:
    found = read(file, ARTICLE, nproc=2)
    assert recipe_from(found.model_dump(mode="json"), "again") == found


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        (ARTICLE, {"global_batch_size": 16}, "train_batch_size is 8 and global_batch_size is 16"),
        ({"gradient_clipping": 0.5}, {"max_grad_norm": 1.0}, "keep one"),
        (ARTICLE, {"nproc": 2, "plan": ["ddp"]}, ""),
        ({"bf16": {"enabled": True}}, {"plan": [{"bf16_master_weights": {}}]}, "keep one"),
        ({"optimizer": {"type": "Lamb"}}, {}, "optimizer.type: 'Lamb' has no counterpart"),
        ({"zero_optimizaton": {}}, {}, "did you mean 'zero_optimization'"),
    ],
)
def test_contradictions_are_refused(
    config: dict[str, Any], more: dict[str, Any], words: str, file: Path
) -> None:
    if not words:  # two layouts: the plan itself says so
        from hasten.recipe.build import requested_plan

        with pytest.raises(InputError, match="both decide which rank holds which part"):
            requested_plan(read(file, config, **more))
        return
    with pytest.raises(InputError, match=words):
        read(file, config, **more)


def test_beside_deep_speed_itself_the_numbers_join_and_the_techniques_do_not(file: Path) -> None:
    config = {**ARTICLE, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.25}
    file.write_text(json.dumps(config))
    entry = {"deep_speed": {"config": str(file)}}
    found = recipe_from({**LEAST, "nproc": 2, "plan": [entry]}, "recipe.yaml")
    assert found.plan == [entry, {"gradient_accumulation": {"micro_batch_size": 2}}]
    assert (found.global_batch_size, found.max_grad_norm) == (8, 0.25)


def test_check_shows_what_becomes_of_each_key(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(json.dumps(CODER))
    assert show_ds_config(file, None, ["nproc=2"]) == 0
    out = capsys.readouterr().out
    assert "honoured  zero_optimization.stage " in out
    assert "ignored   steps_per_print" in out
    assert "to a recipe, for 2 rank(s):" in out
    file.write_text(json.dumps({"amp": {"enabled": True}}))
    assert show_ds_config(file, None, []) == 2
    assert "refused   amp" in capsys.readouterr().out
