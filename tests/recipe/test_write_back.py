"""The first recipe that ``hasten init`` writes, and what is written back into one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.init import init
from hasten.core.context import JobContext
from hasten.errors import InputError
from hasten.recipe import suggest as module
from hasten.recipe.schema import Recipe, load_recipe
from hasten.recipe.suggest import suggest
from hasten.recipe.write_back import write_back
from hasten.training.run import train
from sample_data import dataset

TEXT = """\
# A recipe of somebody's.
model: deepseek-llm-tiny  # small
learning_rate: 2e-3

plan:
  # batches
  - packed                # end to end
  - fused_layers
  - bf16_master_weights:  # on this processor
      only_if_faster: true
output: "runs/x"
"""
NAMES = ("packed", "fused_layers", "bf16_master_weights", "prefetched", "fused_adamw")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT)
    return path


def test_what_did_not_pay_goes_and_all_else_stays_as_it_is(recipe: Path) -> None:
    difference = write_back(recipe, {"plan": ["packed", "fused_adamw"]})
    assert recipe.read_text() == TEXT.replace(
        """  - fused_layers
  - bf16_master_weights:  # on this processor
      only_if_faster: true
""",
        "  - fused_adamw\n",
    )
    changed = [line for line in difference.splitlines() if line[:1] in "+-"][2:]
    assert changed == [
        "-  - fused_layers",
        "-  - bf16_master_weights:  # on this processor",
        "-      only_if_faster: true",
        "+  - fused_adamw",
    ]


def test_a_new_file_leaves_the_recipe_alone(recipe: Path, tmp_path: Path) -> None:
    write_back(recipe, {"learning_rate": 1e-3}, tmp_path / "new.yaml")
    assert recipe.read_text() == TEXT
    found = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert found == {**yaml.safe_load(TEXT), "learning_rate": 1e-3}
    assert "# small" in (tmp_path / "new.yaml").read_text()


def test_auto_becomes_the_list(recipe: Path) -> None:
    recipe.write_text("model: m  # mine\nplan: auto\n")
    write_back(recipe, {"plan": ["packed"]})
    assert recipe.read_text() == "model: m  # mine\nplan:\n  - packed\n"


def test_without_changes_nothing_is_different(recipe: Path) -> None:
    assert write_back(recipe, {}) == ""
    assert recipe.read_text() == TEXT


@given(st.lists(st.sampled_from(NAMES), unique=True), st.integers(1, 9))
def test_the_file_says_what_was_asked_for(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], steps: int
) -> None:
    path = tmp_path_factory.mktemp("r") / "recipe.yaml"
    path.write_text(TEXT)
    write_back(path, {"plan": names, "max_steps": steps})
    found = yaml.safe_load(path.read_text())
    told = [entry if isinstance(entry, str) else next(iter(entry)) for entry in found["plan"]]
    assert set(told) == set(names)
    assert len(told) == len(names)
    assert found["max_steps"] == steps
    assert path.read_text().startswith("# A recipe of somebody's.\nmodel: deepseek-llm-tiny  # sm")


@pytest.mark.parametrize(
    ("text", "said"),
    [("plan: [", "can't be changed"), ("- a\n", "is not a recipe"), (None, "can't be written")],
)
def test_what_can_not_be_changed_is_said(tmp_path: Path, text: Any, said: str) -> None:
    path = tmp_path / "r.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        write_back(path, {"plan": []})


CHANGES = ["max_steps=2", "max_examples=80", "vocabulary=400", "cutoff_len=64"]


def test_it_writes_a_recipe_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    init("deepseek-llm-tiny", dataset("alpaca_en_demo.json", tmp_path), Path("mine.yaml"))
    assert "next: hasten check mine.yaml" in capsys.readouterr().out
    recipe = load_recipe(Path("mine.yaml"), CHANGES)
    assert recipe.output == "runs/mine"
    assert recipe.auto_plan is not None
    assert sorted(p.name for p in tmp_path.glob("*.yaml")) == ["mine.yaml"]
    assert train(recipe, tell=lambda text: None)["steps"] == 2


def test_every_choice_has_its_reason_beside_it(tmp_path: Path) -> None:
    text = suggest("deepseek-llm-tiny", dataset("gsm8k_train.jsonl", tmp_path), "runs/x")
    for key in ("cutoff_len", "finetuning_type", "learning_rate", "plan"):
        assert re.search(rf"(#.*\n)?{key}: .*", text)
        line = next(line for line in text.splitlines() if line.startswith(key))
        above = text.splitlines()[text.splitlines().index(line) - 1]
        assert "#" in line or above.startswith("#"), key
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_short_run_gets_a_short_warm_up_and_evaluations(tmp_path: Path) -> None:
    """500 examples, of which 475 train, are 15 steps of 32."""
    rows = [f'{{"instruction": "say {i}", "output": "{i}"}}\n' for i in range(500)]
    (tmp_path / "few.jsonl").write_text("".join(rows))
    text = suggest("deepseek-llm-tiny", str(tmp_path / "few.jsonl"), "runs/x")
    values = yaml.safe_load(text)
    assert (values["warmup_steps"], values["eval_every"]) == (1, 5)
    assert "of about 15 steps" in text


def test_the_cut_holds_nearly_all_records() -> None:
    cut, reason = module._cutoff(np.array([100] * 99 + [5000], np.int32))
    assert cut % 64 == 0
    assert 100 <= cut < 200
    assert reason == "holds all but 1.00% of the examples whole"
    assert module._cutoff(np.array([33] * 60, np.int32)) == (64, "holds all examples whole")


@pytest.mark.parametrize(("parameters", "lora"), [(10**8, False), (10**12, True)])
def test_lora_is_chosen_where_all_weights_do_not_fit(
    tmp_path: Path, parameters: int, lora: bool
) -> None:
    recipe = Recipe(model="deepseek-llm-tiny", dataset="stdlib", max_steps=1)
    context: JobContext = module.context_of(recipe)
    hardware = replace(context.hardware, accelerators=(), memory_limit_bytes=64 * 10**9)
    context = replace(
        context, hardware=hardware, model=replace(context.model, parameters=parameters)
    )
    assert module._lora(context, fresh=False)[0] is lora


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        init("deepseek-llm-tiny", "stdlib", path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [("deepseek-llm-tiny", "nothere.jsonl", "nothere"), ("deepsek-llm-tiny", None, "did you mean")],
)
def test_what_can_not_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, model: str, data: Any, words: str
) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(InputError, match=words):
        init(model, data or dataset("gsm8k_train.jsonl", tmp_path), path)
    assert not path.exists()
