"""``live_tuning: true``: a whole run tries its settings, says what it did, and learns the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.core.session import Session
from hasten.errors import InputError
from hasten.recipe.schema import Recipe
from hasten.training import auto_adjust
from hasten.training.auto_adjust import adjusted
from hasten.training.run import train
from sample_data import small

PLAN = ["packed", {"gradient_accumulation": {"micro_batch_size": 2}}, "activation_checkpointing"]


def run(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[str], Session]:
    told: list[str] = []
    sessions: list[Session] = []
    values = small(folder, plan=PLAN, max_steps=24, global_batch_size=4, **changes)
    recipe = Recipe(**values)
    return train(recipe, tell=told.append, on_start=sessions.append), told, sessions[0]


@pytest.mark.slow
def test_a_run_tries_its_settings_and_learns_as_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BLOCK", 1), ("LOOKS", (2,)), ("MOST", 2)):
        monkeypatch.setattr(auto_adjust, name, value)
    plain, _, _ = run(tmp_path / "plain")
    summary, told, session = run(tmp_path / "auto", live_tuning=True)
    assert summary["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-4)
    assert plain["adjusted"] == {}
    assert summary["adjusted"] == adjusted(session)
    path = tmp_path / "auto" / "run" / "adjustments.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines
    assert all(line["switch"] is None or line["tries"] >= 2 for line in lines)
    assert [t for t in told if t.startswith("step ")] == [
        auto_adjust.sentence(line) for line in lines
    ]
    kept = {line["switch"]: line["to"] for line in lines if line.get("kept")}
    assert summary["adjusted"] == kept


def test_a_resumed_run_goes_on_with_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the earlier part had kept smaller micro-batches."""
    values = small(tmp_path, plan=PLAN, live_tuning=True, max_steps=2, checkpoint_every=2)
    values["lr_schedule"] = "constant"  # a longer run has another cosine

    def keep(session: Session) -> None:
        assert isinstance(session.setup.live_tuner, auto_adjust.LiveTuning)
        session.setup.live_tuner.load_state_dict(
            {"standing": {"gradient_accumulation.micro_batch_size": 1}}
        )

    train(Recipe(**values), tell=lambda text: None, on_start=keep)
    sessions: list[Session] = []
    again = Recipe(**{**values, "max_steps": 6, "resume": "auto"})
    summary = train(again, tell=lambda text: None, on_start=sessions.append)
    assert summary["steps"] == 6
    assert summary["adjusted"] == {"gradient_accumulation.micro_batch_size": 1}


def test_compiled_blocks_are_refused_before_a_step_is_made(tmp_path: Path) -> None:
    values = small(tmp_path, plan=[{"compiled": {"backend": "aot_eager"}}], live_tuning=True)
    with pytest.raises(InputError, match="leave live_tuning out, or compiled"):
        train(Recipe(**values), tell=lambda text: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
