"""A training leaves what the monitor shows, and writes for other tools where it's asked to."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hasten.errors import InputError
from hasten.monitor.run import Run
from hasten.recipe.schema import Recipe
from hasten.training.run import train
from sample_data import small

PRICE = {"currency": "EUR", "per_device_hour": 2.0}


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    recipe = Recipe(**small(folder, output=str(folder / "run"), **changes))
    return train(recipe, tell=lambda text: None)


def test_a_finished_training_is_shown_with_its_steps_plan_and_cost(tmp_path: Path) -> None:
    summary = run(tmp_path, price=PRICE, plan=["packed"], log_to=["tensorboard"], eval_every=2)
    watched = Run("run", tmp_path / "run")
    while watched.look():
        pass
    with watched.lock:
        found = watched.standing()
    assert (found["status"], found["step"], found["total_steps"]) == ("done", 3, 3)
    assert found["cost"] == summary["cost"]["total"]
    assert found["tokens"] == summary["tokens"]
    assert found["eval_loss"] == pytest.approx(summary["eval_loss"])
    assert [entry["technique"] for entry in watched.start["plan"]] == ["packed"]
    assert {"disks", "network", "limits", "gpus"} <= set(summary["machine"])
    assert not watched.unreadable
    [events] = (tmp_path / "run" / "tensorboard").iterdir()
    written = events.read_bytes()
    assert written.count(b"train/loss") == 3
    assert written.count(b"eval/eval_loss") == 2


def test_the_next_run_tells_which_switches_are_other(tmp_path: Path) -> None:
    run(tmp_path, plan=["packed"])
    run(tmp_path, plan=[])
    watched = Run("run", tmp_path / "run")
    watched.look()
    [event] = watched.events.newest()
    assert event["text"] == "other switches than the run before: - packed"
    assert json.loads((tmp_path / "run" / "previous" / "1" / "run.json").read_text())["plan"]


def test_a_tool_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="wandb"):
        run(tmp_path, log_to=["wandb"])
    assert not (tmp_path / "run").exists()
