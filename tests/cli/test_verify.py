"""``hasten verify`` as a user meets it, alone and before an experiment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.cli.main import app
from hasten.cli.verify import beforehand
from hasten.core.context import ExampleStats
from hasten.core.plan import Plan
from hasten.errors import FAILED, InputError
from hasten.measure.quality import runner
from hasten.measure.quality.verification import tokens_of
from hasten.measure.recipe_experiment import prepared
from hasten.progress import Display, SilentProgress
from hasten.recipe.build import context_of
from hasten.recipe.schema import load_recipe
from hasten.techniques.loss import LabelledTokenLoss
from sample_data import small_recipe


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_plan_is_proven_on_the_recipes_own_job(tmp_path: Path) -> None:
    path = small_recipe(
        tmp_path, plan=["packed", "prefetched", {"compact_adamw": {"moments": "bf16"}}]
    )
    found = call("verify", path, "-o", tmp_path / "found.json", "--json")
    assert found.exit_code == 0, found.output
    report = json.loads((tmp_path / "found.json").read_text())
    assert report == json.loads(found.stdout)
    words = {row["technique"]: row["verdict"] for row in report["verification"]}
    assert words == {"packed": "equal", "prefetched": "equal", "compact_adamw": "not tested"}
    assert {"equal", "not tested"} == {row["verdict"] for row in report["invariance"]}
    left = list((tmp_path / "run" / "data" / "verification").iterdir())
    assert not [p for p in left if p.suffix == ".pt" or p.name.startswith("variant-")]


def test_a_failed_proof_is_exit_code_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, orders: Any) -> list[dict[str, Any]]:
        good = {"error": 0.5, "worst": 0.5, "name": "w", "loss_error": 0.5, "micro_batches": 1}
        rest = {"examples": 4, "tokens": 9, "layers": 1, "change": 0.0, "documents": 4}
        return [{**good, **rest} for _ in orders]

    monkeypatch.setattr(runner.QualityRunner, "__call__", wrong)
    found = call("verify", small_recipe(tmp_path, plan=["packed"]))
    assert found.exit_code == FAILED
    assert "FAIL packed" in found.output


def test_what_was_proven_is_not_proven_again_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def count(self: Any, orders: Any) -> list[dict[str, Any]]:
        asked.append(len(orders))
        return [{"failed": "not here"} for _ in orders]

    monkeypatch.setattr(runner.QualityRunner, "__call__", count)
    subject = prepared(load_recipe(Path(small_recipe(tmp_path, plan=["packed"]))), SilentProgress())
    with Display() as display:
        first = beforehand(True, 0, False, display)(subject)
        assert beforehand(True, 0, False, display)(subject) == first
        assert len(asked) == 1
        for kept in (tmp_path / "run" / "data" / "verification").glob("*.json"):
            kept.write_text("{")  # damaged: as if it weren't there
        beforehand(True, 0, False, display)(subject)
        beforehand(True, 0, True, display)(subject)
        other = replace(subject, plan=Plan([LabelledTokenLoss()]))
        beforehand(True, 0, False, display)(other)
        assert len(asked) == 4
        assert beforehand(False, 0, False, display)(subject) == {}


def test_what_a_dead_process_left_open_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def died(self: Any, orders: Any) -> list[dict[str, Any]]:
        asked.append(len(orders))
        self.broken = True
        return [{"failed": "killed, most likely for want of memory"} for _ in orders]

    monkeypatch.setattr(runner.QualityRunner, "__call__", died)
    subject = prepared(load_recipe(Path(small_recipe(tmp_path, plan=["packed"]))), SilentProgress())
    with Display() as display:
        for _ in range(2):
            found = beforehand(True, 0, False, display)(subject)
            assert {row["verdict"] for row in found["verification"]} == {"not tested"}
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("changes", "words", "why"),
    [
        ({"plan": []}, [], "nothing to prove"),
        ({"plan": ["packed"]}, ["--margin", 2], "--margin"),
        ({"plan": ["muon"], "eval_data": 0}, ["--seeds", 2], "eval_data"),
    ],
)
def test_what_can_not_be_proven_is_said_at_once(
    tmp_path: Path, changes: Any, words: Any, why: str
) -> None:
    found = call("verify", small_recipe(tmp_path, **changes), *words)
    assert isinstance(found.exception, InputError)
    assert why in str(found.exception)


def test_a_training_with_a_seed_is_no_longer_than_the_recipe(tmp_path: Path) -> None:
    known = load_recipe(Path(small_recipe(tmp_path)))
    context = context_of(known)
    examples = ExampleStats(count=100, tokens=5000, longest=90)
    context = replace(context, examples=examples)
    assert tokens_of(known, context) == 3 * 8 * 50
    longer = known.model_copy(update={"max_steps": 10_000})
    assert tokens_of(longer, context) == 50 * 8 * 50


def test_eval_data_records_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    path = small_recipe(tmp_path)
    data = load_recipe(Path(path)).datasets[0].path
    lines = Path(data).read_text().splitlines()[:40]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.jsonl").write_text("\n".join(lines[:3]))
    words = [
        f"dataset={tmp_path}/train.jsonl",
        f"eval_data={tmp_path}/held.jsonl",
        "cutoff_len=512",
    ]
    found = call("check", path, *words)
    assert "3 of 3 eval examples are in the training data too" in found.output
    assert found.exit_code == 0
