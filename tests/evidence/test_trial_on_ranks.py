"""An arm on two ranks: one answer of both, and the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.core.plan import Plan
from hasten.launch.ranks import places
from hasten.measure.trial import Trial, one_answer
from hasten.measure.trial_process import RecipeJob
from hasten.recipe.prepare import ready
from hasten.recipe.schema import recipe_from
from hasten.techniques.wire.compress import Half
from material import small

STEP = {"step": 1, "loss": 2.0, "tokens": 100, "slots": 120, "peak_memory_bytes": 5}


def step(seconds: float, **changes: Any) -> dict[str, Any]:
    return {**STEP, "step_seconds": seconds, "tokens_per_second": 100 / seconds, **changes}


def test_a_step_is_as_long_as_on_the_slowest_rank() -> None:
    ranks = [
        {"steps": [step(1.0), step(4.0)]},
        {"steps": [step(2.0, peak_memory_bytes=9), step(1.0)]},
    ]
    found = one_answer(ranks)["steps"]
    assert [s["step_seconds"] for s in found] == [2.0, 4.0]
    assert [s["tokens_per_second"] for s in found] == [50.0, 25.0]
    assert [s["peak_memory_bytes"] for s in found] == [9, 5]
    assert one_answer(ranks[:1]) is ranks[0]
    assert "turn_seconds" not in one_answer(ranks)


def test_ranks_apart_count_their_mean_tokens_and_the_slowest_turn() -> None:
    ranks = [
        {"steps": [step(1.0, tokens=90), step(4.0, tokens=110)], "apart": True},
        {"steps": [step(2.0, tokens=110), step(1.0, tokens=91)], "apart": True},
    ]
    found = one_answer(ranks)
    assert found["turn_seconds"] == 5.0  # not 2 + 4
    assert [s["tokens"] for s in found["steps"]] == [100, 100]


def test_other_answers_are_the_first_rank_s() -> None:
    assert one_answer([{"held_out_loss": 2.0}, {"held_out_loss": 2.5}]) == {"held_out_loss": 2.0}


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does_and_tell_of_their_own_switches(tmp_path: Path) -> None:
    recipe = recipe_from(small(tmp_path, nproc=2, plan=["half"], max_steps=9), "test")
    ready(recipe, lambda text: None, ranks=2)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    ranks = places(2, 2, tmp_path)
    with Trial(path, Plan([Half(minimum=0)]), {}, tmp_path / "arm.log", ranks=ranks) as trial:
        assert trial.answer()["ready"]
        found = trial.ask("steps", count=3)
        last = trial.ask("evaluate")
        end = trial.ask("finish")
    assert [row["technique"] for row in end["acted"]] == ["half"]  # not the ranks' own layout
    assert end["acted"][0]["acted"] is True
    assert end["ledger"]["step"]["communication"] > 0
    assert end["samples"]
    assert not found["apart"]
    alone = RecipeJob(recipe.model_copy(update={"nproc": 1, "plan": []}), tmp_path / "arm")
    expected = alone.obey({"do": "steps", "count": 3})["steps"]
    assert [s["tokens"] for s in found["steps"]] == [s["tokens"] for s in expected]
    assert last["tokens"] == sum(s["tokens"] for s in expected)
    losses = [s["loss"] for s in expected]
    assert [s["loss"] for s in found["steps"]] == pytest.approx(losses, rel=2e-3)
    held_out = alone.obey({"do": "evaluate"})["held_out_loss"]
    assert last["held_out_loss"] == pytest.approx(held_out, rel=2e-3)
