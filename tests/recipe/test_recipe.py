"""Recipes: strict keys, overrides, and sentences for whatever is wrong."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hasten.core.job import share_of
from hasten.errors import InputError
from hasten.recipe.build import adamw
from hasten.recipe.schema import Recipe, load_recipe, read_yaml, recipe_from

GOOD = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_overrides_win_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(GOOD))
    words = [
        "learning_rate=1e-4",
        "plan=[packed, {gradient_accumulation: {micro_batch_size: 2}}]",
        "seed=7",
    ]
    recipe = load_recipe(path, [*words, "max_steps=5"])
    assert recipe.max_steps == 5, "the file says 3"
    assert recipe.learning_rate == 1e-4
    assert recipe.plan == ["packed", {"gradient_accumulation": {"micro_batch_size": 2}}]
    assert recipe.seed == 7


def test_a_resolved_recipe_is_the_same_recipe(tmp_path: Path) -> None:
    price = {"currency": "EUR", "per_device_hour": 2.5}
    recipe = Recipe(**{**GOOD, "price": price, "plan": [{"packed": None}], "eval_data": "x.jsonl"})
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


def test_numbers_are_those_of_yaml_without_base_60() -> None:
    plain = "0 -1 +12 1_000 0x1F 0b101 017 1.5 -1. 1e-4 1E5 1.5e+3 -.inf .nan a 1.2.3 1e 08 - ~"
    for word in plain.split():
        expected = yaml.safe_load(word) if word not in ("1e-4", "1E5") else float(word)
        assert repr(read_yaml(word, "x")) == repr(expected), word
    assert read_yaml("1:30", "x") == "1:30"
    assert read_yaml("1" + ":1" * 500_000, "x")[:4] == "1:1:"
    assert read_yaml("1:30.5", "x") == "1:30.5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a recipe"),
        ("- a\n- b", "not a recipe"),
        ("model: [", "line 1"),
        ("model: a\nmodel: b", "stands twice"),
        ("model: &a x\ndataset: *a", "aliases"),
        ("model: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: " + "[" * 3000, "not YAML"),
        ("model: a\nplan:\n\t- packed", "line 3: not YAML: the line begins with a tab; indent"),
        ("[model]\nname = 'x'", "line 2: not YAML: expected '<document start>'"),
        ("seed: !!int 1" + ":1" * 9, "a number with a colon"),
        ("seed: !!float 1:1.5", "a number with a colon"),
        ("learning_rte: 1", "did you mean 'learning_rate'"),
        ("3: 4", "unknown key 3"),
        ("model: m\ndataset: d", "max_steps, epochs or max_tokens"),
        ("dataset: d\nmax_steps: 1", "the key 'model' is missing"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": "soon"}, "max_steps"),
        ({"finetuning_type": "loar"}, "finetuning_type"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"hang_seconds": float("inf")}, "hang_seconds"),
        ({"link_seconds": 1e300}, "link_seconds"),
        ({"loss_spike": {"sigmas": float("nan")}}, "loss_spike"),
        ({"global_batch_size": 4, "global_batch_tokens": 9}, "not both"),
        ({"patience": 2}, "eval_every"),
        ({"best_metric": "token_accuracy"}, "must be one of metrics"),
        ({"price": {"per_device_hour": 1}}, "price"),
        ({"price": {"currency": "EUR", "per_device_hour": 1, "spot": 2}}, "price"),
        ({"plan": "packed"}, "plan"),
        ({"cutoff_len": 1}, "cutoff_len"),
        ({"max_grad_norm": 0}, "write null for no clipping"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
        ({"data_workers": 0}, "data_workers: give auto, or a number of processes"),
        ({"data_workers": "many"}, "data_workers: give auto"),
        ({"on_obstacle": "ignore"}, "on_obstacle"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        load_recipe(write(tmp_path, yaml.safe_dump({**GOOD, **changes})))


@pytest.mark.parametrize("word", ["learning_rate", "=3", "", "--seed"])
def test_an_override_is_key_equals_value(tmp_path: Path, word: str) -> None:
    with pytest.raises(InputError, match="key=value"):
        load_recipe(write(tmp_path, yaml.safe_dump(GOOD)), [word])


def test_every_mistyped_key_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    draw = random.Random(0)
    keys = [key for key in Recipe.model_fields if len(key) > 4]
    for _ in range(200):
        key = draw.choice(keys)
        place = draw.randrange(1, len(key) - 1)
        mistyped = key[:place] + draw.choice("QZ") + key[place + 1 :]
        with pytest.raises(InputError, match=f"unknown key '{mistyped}'.*did you mean"):
            load_recipe(write(tmp_path, yaml.safe_dump({**GOOD, mistyped: 1})))


def test_every_key_is_documented_where_it_is_declared() -> None:
    for name, field in Recipe.model_fields.items():
        assert field.description, name


def test_numbers_with_an_exponent_are_numbers() -> None:
    assert read_yaml("[1e-4, 2E3, -1.5e+2, 1e, e4]", "x") == [1e-4, 2e3, -150.0, "1e", "e4"]


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="folder"):
        load_recipe(tmp_path)
    with pytest.raises(InputError, match="larger"):
        load_recipe(write(tmp_path, "#" * (1 << 21)))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("warmup_steps", 1.5, "whole steps, or a share"),
        ("adam_betas", [0.9, 1.0], "below 1"),
        ("adam_betas", [0.9], "adam_betas"),
        ("lora_targets", "q_proj(", "a regular expression"),
    ],
)
def test_numbers_of_the_optimizer_and_expressions_are_checked(
    key: str, value: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        recipe_from({**GOOD, "finetuning_type": "lora", key: value}, "the recipe")


def test_a_share_of_warm_up_is_of_all_steps_and_betas_are_the_optimizers() -> None:
    assert [share_of(asked, 101) for asked in (0, 0.05, 1, 7)] == [0, 6, 1, 7]
    recipe = Recipe(**GOOD, adam_betas=(0.8, 0.999))
    optimizer = adamw(recipe, [("weight", nn.Parameter(torch.zeros(2, 2)))])
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.999)}


@pytest.mark.parametrize("key", ["dataset", "output", "chat_template", "model"])
@pytest.mark.parametrize(
    ("text", "character"),
    [
        (r"a\0b", "a NUL character"),
        (r"a\uD800b", r"half a surrogate pair \(.ud800\)"),
    ],
)
def test_texts_that_no_file_can_have_are_refused_by_key(
    tmp_path: Path, key: str, text: str, character: str
) -> None:
    values = {**GOOD, "output": "out", key: "TEXT"}
    path = write(tmp_path, yaml.safe_dump(values).replace("TEXT", f'"{text}"'))
    with pytest.raises(InputError, match=f"{key} has {character} in .*; remove it"):
        load_recipe(path)


def test_a_text_deep_in_a_value_is_checked_too() -> None:
    with pytest.raises(InputError, match="dataset has a NUL character"):
        recipe_from({**GOOD, "dataset": [{"path": "a\0b"}]}, "x")


@pytest.mark.parametrize("number", ["9" * 6000, "0x" + "f" * 9000, str(2**64), str(-(2**63) - 1)])
def test_an_integer_beyond_64_bits_is_refused(tmp_path: Path, number: str) -> None:
    with pytest.raises(InputError, match="an integer beyond 64 bits is not allowed") as caught:
        load_recipe(write(tmp_path, yaml.safe_dump(GOOD)), [f"max_steps={number}"])
    assert len(str(caught.value)) < 200
    assert read_yaml(str(2**64 - 1), "x") == 2**64 - 1


def test_a_seed_beyond_63_bits_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(GOOD))
    with pytest.raises(InputError, match=r"seed is .*; it must be less than"):
        load_recipe(path, [f"seed={2**63}"])
    assert load_recipe(path, [f"seed={2**63 - 1}"]).seed == 2**63 - 1


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        recipe_from({**GOOD, "max_steps": "x" * 100_000}, "x")
    assert len(str(caught.value)) < 400


def test_a_pipe_as_a_recipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file; give the path of a recipe"):
        load_recipe(tmp_path / "pipe")
