"""Configurations of other tools, each with its own reading of what the tool does with it.

A case of ``foreign/*.yaml`` is the ``base`` with ``config`` over it; null takes a key away.

- ``recipe``: values of the loaded recipe, or ``plan.TECHNIQUE[.SETTING]`` of its plan
- ``absent``: keys that stand at hasten's default
- ``named``: all keys that the import must report, besides ``told`` of the file
- ``words``: by key, words of what is said of it
- ``refused``: words in the sentence of a refusal
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hasten.cli.import_ import import_
from hasten.data.prompt_formats import PROMPT_FORMATS
from hasten.errors import EXTRAS, InputError, pip_install
from hasten.recipe.importers import axolotl, llama_factory, read
from hasten.recipe.schema import Recipe, _foreign_table, foreign_words, load_recipe, recipe_from
from hasten.recipe.shorthands import catalogue

FOLDER = Path(__file__).with_name("foreign")
SETS = {
    path.stem: yaml.load(path.read_text(), yaml.CSafeLoader)
    for path in sorted(FOLDER.glob("*.yaml"))
}
CASES = [(name, case) for name, found in SETS.items() for case in found["cases"]]
REST = ["model=m", "dataset=d.jsonl", "max_steps=1"]


def written(folder: Path, name: str, case: dict[str, Any]) -> Path:
    """The case as a file of its tool."""
    form = SETS[name]
    values = {k: v for k, v in {**form["base"], **case.get("config", {})}.items() if v is not None}
    is_json = "text" in case or case.get("json", form.get("json", False))
    path = folder / ("config.json" if is_json else "config.yaml")
    text = json.dumps(values) if is_json else yaml.safe_dump(values, sort_keys=False)
    path.write_text(case.get("text", text))
    return path


def value_of(recipe: Recipe, name: str) -> Any:
    """A key of the recipe, or a technique of its plan (true: it is there), or its setting."""
    if name == "loss":
        return recipe.loss_name
    if name.startswith("preference."):
        return getattr(recipe.preference, name.partition(".")[2])
    if not name.startswith("plan."):
        return recipe.model_dump(mode="json", exclude_defaults=name == "dataset")[name]
    plan: dict[str, Any] = {}
    for entry in recipe.plan:
        plan |= {entry: {}} if isinstance(entry, str) else dict(entry)
    _, technique, *setting = name.split(".")
    if technique not in plan:
        return None
    return (plan[technique] or {}).get(setting[0]) if setting else True


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}: {c['name']}" for n, c in CASES])
def test_a_configuration_means_here_what_it_means_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, case: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert case["source"]
    path, output = written(tmp_path, name, case), tmp_path / "recipe.yaml"
    ranks = case.get("ranks", 1)
    changes = [f"nproc={ranks}"] if ranks > 1 else []
    if "refused" in case:
        with pytest.raises(InputError) as refused:
            import_(path, changes, output)
        assert case["refused"] in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not output.exists()
        return
    found = read(path, ranks)
    assert found.format == SETS[name]["tool"]
    told = {row.key for row in found.rows if row.fate in ("unmapped", "contradicts")}
    expected = {*SETS[name].get("told", ()), *case.get("named", ())} - {*case.get("untold", ())}
    assert told == expected
    for key, words in case.get("words", {}).items():
        assert any(row.key == key and words in row.explanation for row in found.rows)
    found.values.update({"nproc": ranks} if ranks > 1 else {})
    found.check(str(path))
    output.write_text(found.to_yaml(path.name))
    missing = [word for word in REST if word.partition("=")[0] in found.missing]
    recipe = load_recipe(output, missing)
    wanted = case.get("recipe", {})
    assert {key: value_of(recipe, key) for key in wanted} == wanted
    for key in case.get("absent", ()):
        default = None if key.startswith("plan.") else Recipe.model_fields[key].default
        assert value_of(recipe, key) == default or key not in found.values, key


@pytest.mark.parametrize("tool", [axolotl, llama_factory])
def test_named_templates_are_formats_that_hasten_has(tool: ModuleType) -> None:
    formats = {*tool.TEMPLATES.values(), *getattr(tool, "PROMPTS", {}).values()}
    assert formats <= set(PROMPT_FORMATS)


def test_there_are_enough_configurations_of_each_tool() -> None:
    assert len(CASES) >= 120
    names = [(name, case["name"]) for name, case in CASES]
    assert len(set(names)) == len(names)


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
        ("rlhf_type", "rlhf_type is stage here"),
        ("dpo_beta", "dpo_beta is beta in preference, with a stage here"),
        ("reward_model", "reward_model is stage: rm here"),
        ("use_weighting", "use TRL's DPOTrainer with hasten.speed_up"),
        ("num_generations", "use TRL's GRPOTrainer with hasten.speed_up"),
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
