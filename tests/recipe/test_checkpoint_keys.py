"""The keys on checkpoints are settings of the technique, in the plan of the resolved recipe."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.errors import InputError
from hasten.recipe.build import requested_plan
from hasten.recipe.schema import Recipe, recipe_from
from hasten.techniques.checkpoint import Checkpoints

GOOD: dict[str, Any] = {"model": "deepseek-llm-tiny", "dataset": "stdlib", "max_steps": 3}


def read(**keys: Any) -> Recipe:
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
    recipe = read(**keys)
    assert list(requested_plan(recipe)) == [technique]
    assert recipe.checkpoint_every is None
    assert recipe.checkpoint_dir is None
    assert recipe_from(recipe.model_dump(), "again") == recipe


def test_other_techniques_stay(tmp_path: Any) -> None:
    plan = list(requested_plan(read(plan=["packed", "document_attention"], checkpoint_every=5)))
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
        ({"checkpoint_dir": "x", "plan": [{"checkpoints": 3}]}, "checkpoints is 3; write its"),
        ({"resume": "atuo"}, "resume: give auto, never, or the path"),
        ({"resume": True}, "resume: give auto, never, or the path"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(**keys)


def test_a_checkpoint_to_go_on_from_is_named_by_its_path() -> None:
    assert read(resume="runs/a/checkpoints/step-00000100").resume.endswith("100")
