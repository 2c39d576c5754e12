"""``hasten keys``: every recipe key and technique, read from the schema."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hasten.recipe.schema import Recipe
from hasten.techniques import CATALOGUE

Hasten = Callable[..., tuple[int, str, str]]


def test_all_keys_and_techniques_are_listed_with_type_default_and_meaning(hasten: Hasten) -> None:
    code, out, err = hasten("keys", "--json")
    assert (code, err) == (0, "")
    tables = json.loads(out)
    assert [row["name"] for row in tables["keys"]] == list(Recipe.model_fields)
    assert [row["name"] for row in tables["techniques"]] == [kind.name() for kind in CATALOGUE]
    for row in tables["keys"]:
        assert row["type"]
        assert row["meaning"] == Recipe.model_fields[row["name"]].description
    rows = {row["name"]: row for row in tables["keys"]}
    assert rows["model"]["default"] == "required"
    assert rows["dataset"]["type"] == "str | list of str | DataSource"
    assert json.loads(rows["adam_betas"]["default"]) == [0.9, 0.95]
    code, out, _ = hasten("keys")
    assert code == 0
    assert all(f"\n  {name} " in out for name in rows)


def test_one_key_and_one_technique(hasten: Hasten) -> None:
    code, out, _ = hasten("keys", "lr_schedule")
    assert code == 0
    assert "constant | linear | cosine | wsd" in out
    assert '"cosine"' in out
    code, out, _ = hasten("keys", "gradient_accumulation")
    assert code == 0
    assert "technique of slot batch" in out
    assert "micro_batch_size" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("learning_rat", "did you mean 'learning_rate'"),
        ("num_train_epochs", "num_train_epochs is epochs here"),
        ("bf16", "bf16_master_weights or autocast"),
    ],
)
def test_an_unknown_name_is_answered_with_what_to_write(
    hasten: Hasten, name: str, words: str
) -> None:
    code, out, err = hasten("keys", name)
    assert (code, out) == (2, "")
    assert words in err
