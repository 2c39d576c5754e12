"""A key of another trainer's file is answered with the recipe's own; no message names a package
that isn't there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hasten.errors import EXTRAS, InputError, pip_install
from hasten.recipe.schema import Recipe, _foreign_table, foreign_words, recipe_from
from hasten.recipe.shorthands import catalogue

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("model_name_or_path", "LLaMA-Factory's|TRL's model_name_or_path is model here"),
        ("num_train_epochs", "transformers' num_train_epochs is epochs here"),
        ("gradient_accumulation_steps", "global_batch_size .* gradient_accumulation"),
        ("per_device_train_batch_size", "global_batch_size .* gradient_accumulation"),
        ("bf16", "bf16_master_weights or autocast in plan here"),
        ("packing", "packed and document_attention in plan here"),
        ("sample_packing", "Axolotl's sample_packing is packed"),
        ("num_processes", "accelerate's num_processes is nproc here"),
        ("use_galore", "isn't supported: there is no GaLore"),
        ("lerning_rate", "did you mean 'learning_rate'"),
        ("entirely_unknown_key", "docs/reference/recipe.md lists all keys"),
    ],
)
def test_an_unknown_key_is_answered_with_what_to_write(key: str, instead: str) -> None:
    values = {"model": "m", "dataset": "d", "max_steps": 1, key: 1}
    with pytest.raises(InputError, match=f"unknown key '{key}'.*({instead})"):
        recipe_from(values, "a.yaml")


def test_what_is_named_instead_is_a_key_or_a_technique() -> None:
    known = set(Recipe.model_fields) | {t.name() for t in catalogue()} | {"plan"}
    for key, sentence in _foreign_table().items():
        if " is " in sentence and sentence.endswith(" here"):
            words = sentence.partition(f"{key} is ")[2].replace(":", " ").split()
            assert any(word.strip(",(){}[]") in known for word in words), sentence


def test_a_recipes_own_keys_are_not_foreign_to_it() -> None:
    recipe = recipe_from({"model": "m", "dataset": "d", "max_steps": 1}, "a.yaml")
    assert recipe.model == "m"
    assert foreign_words("no such key") == ""


def test_extras_are_installed_under_their_packages_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, words in EXTRAS.items():
        assert [word.strip("'") for word in words.split()] == extras[extra]
        assert pip_install(extra) == f"pip install {words}"


def test_no_page_and_no_message_installs_the_projects_name() -> None:
    """The name isn't the project's on the public index."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("README*.md"), *ROOT.glob("src/**/*.py")]
    found = [p for p in pages if "hasten[" in p.read_text() and p.name != "log.md"]
    assert not [str(p) for p in found if "pip install" in p.read_text().partition("hasten[")[0]]
    assert not [str(p) for p in pages if "install 'hasten" in p.read_text()]
