"""What paid goes into the recipe's own file: comments, order and everything else stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.recipe.write_back import write_back

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
