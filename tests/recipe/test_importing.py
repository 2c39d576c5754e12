"""Other trainers' files: every key is accounted for, what they mean is kept, and it trains."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foreign_configs import ACCELERATE, AXOLOTL, LLAMA_FACTORY, TRAINING_ARGUMENTS
from hasten.cli.check import check
from hasten.cli.import_ import import_
from hasten.core import context as facts
from hasten.errors import InputError
from hasten.machine import host
from hasten.machine.gain import Gain
from hasten.recipe.importers import FORMATS, ImportedRecipe, read
from hasten.recipe.schema import load_recipe
from hasten.recipe.yaml_reader import check_keys
from hasten.techniques import precision
from hasten.training.run import train
from sample_data import dataset


def imported(folder: Path, text: str, name: str = "config.yaml", ranks: int = 1) -> ImportedRecipe:
    path = folder / name
    path.write_text(text)
    return read(path, ranks)


def fates(found: ImportedRecipe) -> dict[str, str]:
    return {row.key: row.fate for row in found.rows}


def test_two_keys_that_ask_for_the_same_make_one_line_of_the_plan(tmp_path: Path) -> None:
    more = '{"packing": true, "padding_free": true, "adam_epsilon": 1e-6, '
    found = imported(tmp_path, TRAINING_ARGUMENTS.replace("{", more, 1), "args.json")
    assert found.values["plan"].count("packed") == 1
    assert found.values["plan"].count("document_attention") == 1
    assert fates(found)["adam_epsilon"] == "unmapped", "another epsilon is another training"


@pytest.mark.parametrize("text", [LLAMA_FACTORY, AXOLOTL, ACCELERATE, TRAINING_ARGUMENTS])
def test_no_key_is_passed_over(tmp_path: Path, text: str) -> None:
    filled = text if text is TRAINING_ARGUMENTS else text.format(model="m", folder="f", data="d")
    found = imported(tmp_path, filled)
    assert set(yaml.safe_load(filled)) <= set(fates(found))


def test_two_keys_that_cannot_both_be_meant_are_told(tmp_path: Path) -> None:
    text = TRAINING_ARGUMENTS.replace('"bf16": false', '"bf16": true')
    found = imported(tmp_path, text)
    assert "contradicts" in {row.fate for row in found.rows if row.key == "bf16"}


def test_a_ds_config_is_named_by_the_recipe(tmp_path: Path) -> None:
    text = json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 8})
    found = imported(tmp_path, text, "ds.json")
    assert found.values["deepspeed"] == str(tmp_path / "ds.json")


BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\r\n"]
COMMAND = "leave_command: [touch, owned]"


@pytest.mark.parametrize("end", BREAKS)
def test_no_text_of_the_file_becomes_a_key_of_the_recipe(tmp_path: Path, end: str) -> None:
    """A key, a value that is quoted in a comment, and the file's own name."""
    hostile = f"x{end}{COMMAND}{end}#"
    values = {**json.loads(TRAINING_ARGUMENTS), hostile: 1, "report_to": hostile}
    found = imported(tmp_path, json.dumps(values))
    text = found.to_yaml(f"sft{end}{COMMAND}{end}#.json")
    assert list(yaml.safe_load(text)) == list(found.values)
    assert "leave_command" not in yaml.safe_load(text)
    assert not [line for line in text.splitlines() if line.startswith("leave_command")]


def test_a_recipe_that_reads_back_with_other_keys_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="other keys"):
        check_keys(f"model: a  # b\n{COMMAND}\n", ["model"])


OTHER_TRAININGS = {
    LLAMA_FACTORY: [
        *[{"stage": s} for s in ("ppo", "unheard_of")],
        *({"image_max_pixels": 262144}, {"export_dir": "out"}),
        *[{"stage": "dpo", "pref_loss": name} for name in ("kto_pair", "unheard_of")],
        *({"stage": "dpo", "pref_bco_weight": 0.5}, {"stage": "kto", "ref_model_adapters": "a"}),
        {"stage": "dpo", "image_max_pixels": 262144},
        *({"infer_backend": "vllm"}, {"do_train": False, "do_predict": True}),
    ],
    AXOLOTL: [
        *[{"rl": rl} for rl in ("grpo", "gdpo", "ebft")],
        *({"rl": "dpo", "dpo_use_weighting": True}, {"rl": "ipo", "dpo_loss_type": ["aot"]}),
        *({"process_reward_model": True}, {"num_labels": 1}),
        *({"processor_type": "AutoProcessor"}, {"diffusion": {"mask": 1}}),
        {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]},
    ],
    TRAINING_ARGUMENTS: [
        *({"beta": 0.1, "num_generations": 8}, {"num_ppo_epochs": 4}),
        *({"beta": 0.1, "loss_type": name} for name in ("exo_pair", ["sigmoid", "bco_pair"])),
        *(
            {"beta": 0.1, "sync_ref_model": True},
            {"beta": 0.1, "f_divergence_type": "js_divergence"},
        ),
    ],
}


@pytest.mark.parametrize(
    ("form", "asked"), [(form, asked) for form, all_ in OTHER_TRAININGS.items() for asked in all_]
)
def test_a_file_of_another_training_is_refused_by_its_key_and_nothing_is_written(
    tmp_path: Path, form: str, asked: dict[str, Any]
) -> None:
    text = form if form is TRAINING_ARGUMENTS else form.format(model="m", folder="f", data="d")
    source, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text(json.dumps({**yaml.safe_load(text), **asked}))
    expected = f"{list(asked)[-1]}: .* means .* nothing was written"
    with pytest.raises(InputError, match=expected) as refused:
        import_(source, [], recipe)
    words = str(refused.value)
    trained = [t for t in ("a preference loss", "reinforcement") if t in words]
    assert bool(trained) == ("Trainer with hasten.speed_up" in words)
    assert not recipe.exists()


def test_the_last_line_says_how_it_trains_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    text = AXOLOTL.format(model="m", folder="f", data="d.json").replace("sample_packing: true", "")
    source.write_text(text)
    import_(source, [], recipe)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert f"hasten train {recipe} plan=auto" in last
    assert "gradient_accumulation" in str(load_recipe(recipe).plan)
    assert load_recipe(recipe, ["plan=auto"]).plan == [], "the file's passes go with its plan"


def test_a_refused_recipe_is_not_left_behind(tmp_path: Path) -> None:
    source, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    source.write_text(AXOLOTL.format(model="m", folder="f", data="d"))
    with pytest.raises(InputError, match="learning_rate"):
        import_(source, ["learning_rate=-1"], recipe)
    assert not recipe.exists()


@pytest.mark.parametrize("name", ["LLaMA-Factory", pytest.param("axolotl", marks=pytest.mark.long)])
def test_the_imported_recipe_trains(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dataset("alpaca_en_demo.json", tmp_path)
    info = {"alpaca_en_demo": {"file_name": Path(data).name}}
    (Path(data).parent / "dataset_info.json").write_text(json.dumps(info))
    form = LLAMA_FACTORY if name == "LLaMA-Factory" else AXOLOTL
    text = form.format(model="deepseek-llm-tiny", folder=Path(data).parent, data=data)
    path, recipe = tmp_path / "config.yaml", tmp_path / "recipe.yaml"
    path.write_text(text)
    changes = [f"output={tmp_path}/run", "vocabulary=400", "eval_data=4", "max_examples=40"]
    import_(path, changes, recipe)
    assert "taken over" in capsys.readouterr().out
    summary = train(load_recipe(recipe), tell=lambda text: None)
    assert summary["steps"] == int(yaml.safe_load(text)["max_steps"])
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    if name == "LLaMA-Factory":  # eval_steps is 0.6 of 3 steps
        lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [2, 3]
        effects = {
            kind: summary["effective"][kind]["effective"] for kind in ("packed_epoch", "packed")
        }
        assert effects == {"packed_epoch": True, "packed": True}


@pytest.mark.parametrize("low", [0.5, 1.1])
@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_a_number_format_is_kept_and_told_where_it_gains_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bf16_products: None,
    asked: str,
    low: float,
) -> None:
    monkeypatch.setattr(precision, "bf16_gain", lambda device: Gain(low + 0.1, low, low + 0.2, 6))
    path = tmp_path / "config.yaml"
    path.write_text(f"stage: sft\nfinetuning_type: full\ncutoff_len: 64\n{asked}: true\n")
    import_(path, [], tmp_path / "recipe.yaml")
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["plan"]
    formats = {"bf16": {"autocast": {"dtype": "bf16"}}, "fp16": {"autocast": {"dtype": "fp16"}}}
    assert formats[asked] in written
    told = "hasten wouldn't choose it here: bf16 has 0.60× [0.50, 0.70]" in capsys.readouterr().out
    assert told == (low < 1 and asked != "fp16")


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_import_check_and_train_say_the_same_of_a_format_that_this_processor_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    plain = dataclasses.replace(host.hardware(), instruction_sets=("avx2",), accelerators=())
    monkeypatch.setattr(facts, "hardware", lambda: plain)
    data, output = dataset("alpaca_en_demo.json", tmp_path), tmp_path / "recipe.yaml"
    (tmp_path / "config.yaml").write_text(
        f"stage: sft\nfinetuning_type: full\nmodel_name_or_path: deepseek-llm-tiny\n{asked}: true\n"
        f"dataset: {data}\ncutoff_len: 64\nmax_steps: 1\nmax_samples: 9\n"
        f"output_dir: {tmp_path}/run\n"
    )
    import_(tmp_path / "config.yaml", ["from_scratch=true", "device=cpu"], output)
    (found,) = (x for x in capsys.readouterr().out.splitlines() if "continuing without" in x)
    sentence = found.partition(": ")[2]
    check(output)
    assert sentence in capsys.readouterr().out
    lines: list[str] = []
    train(load_recipe(output), tell=lines.append)
    assert sentence in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: !!python/object/apply:os.system ['touch /tmp/x']\n", "constructor"),
        ("\n".join(f"key{i}: {i}" for i in range(100_000)), "larger than|more than"),
        ("stage: sft\nfinetuning_type: full\nx: " + "[" * 40 + "]" * 40, "more than"),
        ("stage: sft\nstage: pt\n", "stands twice"),
        ("name: somebody\nage: 3\n", "no configuration of"),
        ("- a\n- b\n", "has no keys"),
        ("", "has no keys"),
        ("trl sft --model_name_or_path m", "options of a command line as YAML"),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        imported(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_folder_is_refused_with_the_configurations_in_it(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("stage: sft\nfinetuning_type: full\ncutoff_len: 64\n")
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (tmp_path / "broken.yml").write_text("a: [")
    with pytest.raises(InputError, match=r"give one of its .* files \(ds\.json, sft\.yaml\)$"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no configuration of .*DeepSpeed: give one"):
        read(tmp_path / "empty")


plain: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(0, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
known = st.sampled_from(sorted({key for form in FORMATS for key in form.KEYS}))


@given(values=st.dictionaries(known, plain, min_size=3, max_size=12))
def test_any_value_under_any_key_is_taken_or_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    said = ""
    try:
        found = imported(tmp_path_factory.mktemp("any"), json.dumps(values))
    except InputError as error:
        said = str(error)
    else:
        assert isinstance(found.to_yaml("any"), str)
    assert "\n" not in said


ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "max_steps": 1,
    "output_dir": "out",
    "num_train_epochs": 1,
}
ACCELERATE_FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "mixed_precision": "no",
}
AXOLOTL_FSDP = {"base_model": "m", "datasets": [], "micro_batch_size": 1, "sequence_len": 8}


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
    found = imported(tmp_path, json.dumps(ARGUMENTS | {"fsdp": words}))
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
    given = ACCELERATE_FSDP | {"distributed_type": "FSDP", "fsdp_config": block}
    found = imported(tmp_path, json.dumps(given))
    assert found.values["plan"] == [
        {"fsdp2": {"reshard": False, "offload": True}},
        "activation_checkpointing",
    ]
    told = rows(found)
    assert {f"fsdp_config.{name}" for name in block} <= set(told)
    assert told["fsdp_config.fsdp_backward_prefetch"][0] == "needless"
    assert told["fsdp_config.fsdp_reshard_after_forward"][0] == "contradicts"
    assert told["fsdp_config.fsdp_something_new"][0] == "unmapped"
    off = imported(tmp_path, json.dumps(given | {"distributed_type": "MULTI_GPU"}))
    assert rows(off)["fsdp_config"] == ("needless", "it is off")
    assert "plan" not in off.values


def test_axolotl_s_second_fsdp_needs_no_words(tmp_path: Path) -> None:
    block = {"reshard_after_forward": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    found = imported(tmp_path, json.dumps(AXOLOTL_FSDP | {"fsdp_version": 2, "fsdp_config": block}))
    assert {"fsdp2": {"reshard": False}} in found.values["plan"]
    assert "layout" not in found.values


DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}},
}


@pytest.mark.parametrize("wrong", [7, "x", [1], True])
@pytest.mark.parametrize("key", ["optimizer", "scheduler", "params", "zero_optimization", "fp16"])
def test_a_deepspeed_section_that_is_no_object_is_refused_in_words(
    tmp_path: Path, key: str, wrong: Any
) -> None:
    config = json.loads(json.dumps(DS_CONFIG))
    if key == "params":
        config["optimizer"][key] = config["scheduler"][key] = wrong
    else:
        config[key] = wrong
    source = tmp_path / "ds_config.json"
    source.write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{key} is .*; it must be a JSON object"):
        read(source).check("recipe.yaml")


@pytest.mark.parametrize("clipping", [{}, {"gradient_clipping": "auto"}])
def test_a_deepspeed_file_without_clipping_clips_nothing(
    tmp_path: Path, clipping: dict[str, Any]
) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {}} | clipping))
    given = ARGUMENTS | {"max_grad_norm": 0.5, "deepspeed": "ds_config.json"}
    found = imported(tmp_path, json.dumps(given))
    assert found.values["max_grad_norm"] == (0.5 if clipping else None)
    fates = [row.fate for row in found.rows if row.key == "max_grad_norm"]
    assert ("contradicts" in fates) == (not clipping)


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
    found = imported(tmp_path, json.dumps(given))
    assert "plan" not in found.values
    assert found.values["on_obstacle"] == "skip"
    assert rows(found)["fp16"][0] == fate
    assert words in rows(found)["fp16"][1]


def test_a_format_that_the_file_leaves_open_is_the_plan_s(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps({"fp16": {"enabled": "auto"}}))
    found = imported(
        tmp_path, json.dumps(ARGUMENTS | {"fp16": True, "deepspeed": "ds_config.json"})
    )
    assert found.values["plan"] == [{"autocast": {"dtype": "fp16"}}]
    (tmp_path / "ds_config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        imported(tmp_path, json.dumps(ARGUMENTS | {"fp16": True, "deepspeed": "ds_config.json"}))
