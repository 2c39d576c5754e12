"""The keys ``deepspeed``, ``layout`` and those on checkpoints are techniques of the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.check import show_ds_config
from hasten.core.technique import Technique
from hasten.errors import InputError
from hasten.machine.environment import World
from hasten.recipe.build import mixed_layouts, requested_plan
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques.checkpoint import Checkpoints
from hasten.techniques.layout.ddp import DDP
from hasten.techniques.layout.fsdp import FSDP2
from hasten.techniques.layout.hybrid import Hybrid
from hasten.techniques.layout.tensor import TensorParallel
from tiny import job_context, language_job
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
        *(
            ({"optimizer": {"type": "AdamW", "params": {key: value}}}, {}, f"{key} is {word}")
            for key, value, word in (
                ("adam_w_mode", False, "false"),
                ("bias_correction", False, "false"),
                ("amsgrad", True, "true"),
                ("maximize", True, "true"),
            )
        ),
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


def read_layout(**keys: Any) -> Recipe:
    given = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 1, **keys}
    return recipe_from(given, "a recipe")


@pytest.mark.parametrize(
    ("layout", "technique"),
    [
        ("fsdp2", FSDP2()),
        ("ddp", DDP()),
        ("tensor-parallel", TensorParallel()),
        ({"fsdp2": {"reshard": False}}, FSDP2(reshard=False)),
        ({"dp": 2, "tp": 2}, Hybrid(dp=2, tp=2)),
        ({"shard": 4, "sequence": False}, Hybrid(shard=4, sequence=False)),
    ],
)
def test_it_joins_the_plan_and_the_resolved_recipe_has_it_there_alone(
    layout: Any, technique: Technique
) -> None:
    recipe = read_layout(layout=layout, plan=["packed"])
    assert technique in list(requested_plan(recipe))
    assert recipe.layout is None
    again = recipe_from(recipe.model_dump(), "its resolved form")
    assert requested_plan(again) == requested_plan(recipe)


def test_it_stands_beside_the_keys_of_checkpoints() -> None:
    plan = list(requested_plan(read_layout(layout="ddp", checkpoint_every=5)))
    assert plan == [DDP(), Checkpoints(5)]


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("fsdp3", "did you mean 'fsdp2'"),
        ("rings", "layouts: ddp"),
        ({"sequense": False}, "did you mean 'sequence'"),
        ({"dp": 2, "tp": 0}, "layout's tp is 0"),
        ({"dp": True}, "layout's dp is True"),
        (4, "give a name"),
        ({}, "give a name"),
        ({"dp": 2, "rings": 2}, "sizes: dp, shard, tp, pp, ep"),
    ],
)
def test_what_is_no_layout_is_refused_with_one_sentence(layout: Any, says: str) -> None:
    with pytest.raises(InputError, match="a recipe: ") as told:
        read_layout(layout=layout)
    assert says in str(told.value)


def test_two_layouts_are_one_too_many() -> None:
    with pytest.raises(InputError, match="fsdp2"):
        requested_plan(read_layout(layout="fsdp2", plan=["ddp"]))


GOOD: dict[str, Any] = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}


def read_checkpoints(**keys: Any) -> Recipe:
    return recipe_from({**GOOD, **keys}, "recipe.yaml")


@pytest.mark.parametrize(
    ("keys", "technique"),
    [
        ({"checkpoint_every": "dynamic"}, Checkpoints()),
        ({"checkpoint_every": 50}, Checkpoints(50)),
        ({"checkpoint_every": 50, "checkpoint_dir": "a/b"}, Checkpoints(50, folder="a/b")),
        ({"plan": ["checkpoints"], "checkpoint_dir": "x"}, Checkpoints(folder="x")),
        (
            {"plan": [{"checkpoints": {"interval": 7}}], "checkpoint_dir": "x"},
            Checkpoints(7, folder="x"),
        ),
        (
            {"plan": [{"technique": "checkpoints", "interval": 7}], "checkpoint_dir": "x"},
            Checkpoints(7, folder="x"),
        ),
        ({"plan": [{"checkpoints": None}], "checkpoint_dir": "x"}, Checkpoints(folder="x")),
    ],
)
def test_the_keys_become_a_technique(keys: dict[str, Any], technique: Checkpoints) -> None:
    recipe = read_checkpoints(**keys)
    assert list(requested_plan(recipe)) == [technique]
    assert recipe.checkpoint_every is None
    assert recipe.checkpoint_dir is None
    assert recipe_from(recipe.model_dump(), "again") == recipe


def test_other_techniques_stay(tmp_path: Any) -> None:
    plan = list(
        requested_plan(read_checkpoints(plan=["packed", "document_attention"], checkpoint_every=5))
    )
    assert Checkpoints(5) in plan
    assert len(plan) == 3


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"checkpoint_every": 0}, "give dynamic, or a number of steps"),
        ({"checkpoint_every": "sometimes"}, "give dynamic, or a number of steps"),
        ({"checkpoint_every": True}, "give dynamic, or a number of steps"),
        ({"checkpoint_every": 5, "plan": ["checkpoints"]}, "both set when to save"),
        ({"checkpoint_every": 5, "checkpoint_dir": ""}, "give a folder or an address"),
        ({"checkpoint_dir": "x"}, "checkpoint_dir has no effect"),
        ({"checkpoint_dir": "x", "plan": [{"checkpoints": 3}]}, "can.t read .*; write a technique"),
        ({"resume": "atuo"}, "resume: give auto, never, or the path"),
        ({"resume": True}, "resume: give auto, never, or the path"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_checkpoints(**keys)


def test_a_checkpoint_to_go_on_from_is_named_by_its_path() -> None:
    assert read_checkpoints(resume="runs/a/checkpoints/step-00000100").resume.endswith("100")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_few_or_prime_ranks_can_not_be_mixed(ranks: int) -> None:
    assert mixed_layouts(ranks) == []


def test_four_ranks_are_dealt_out_in_every_way() -> None:
    said = {str(t) for t in mixed_layouts(4)}
    assert said == {
        "hybrid(dp=2, shard=2)",
        "hybrid(dp=2, tp=2)",
        "hybrid(shard=2, tp=2)",
        "hybrid(dp=2, pp=2)",
        "hybrid(dp=4, ep=2)",
        "hybrid(dp=2, tp=2, ep=2)",
        "hybrid(dp=2, pp=2, ep=2)",
    }


@given(st.integers(1, 64))
def test_every_mixture_takes_all_ranks_and_comes_once(ranks: int) -> None:
    found = mixed_layouts(ranks)
    assert len(set(found)) == len(found)
    facts = dataclasses.replace(job_context(language_job()), world=World(size=ranks))
    for layout in found:
        s = layout.settings()
        assert s["dp"] * s["shard"] * s["tp"] * s["pp"] == ranks
        assert not any("ranks and" in o for o in layout.unsupported_reasons(facts))
