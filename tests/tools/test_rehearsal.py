"""A rehearsal of a launch: ``python tools/netlab rehearse``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hasten.errors import InputError
from hasten.launch.targets import Launch
from netlab import rehearsal
from netlab.__main__ import app

RECIPE = """\
model: deepseek-llm-7b
from_scratch: true
dataset: data/x.jsonl
cutoff_len: 4096
max_steps: 100
global_batch_size: 256
plan: [packed, document_attention]
output: runs/x
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def rehearsed(recipe: Path, *options: str) -> str:
    words = ["rehearse", str(recipe), "--output", "out", *options]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_rehearsal_is_of_a_tiny_model_of_the_family_and_says_what_its_run_did(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []

    def rehearse(launch: Launch, *given: object, **more: object) -> rehearsal.Rehearsed:
        launches.append(launch)
        summary = {"stopped": "done", "steps": 3, "tokens": 1234}
        return rehearsal.Rehearsed("user", (), (700, 900), summary)

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    out = rehearsed(recipe, "--nodes", "2")
    assert "rehearsal: deepseek-llm-tiny for deepseek-llm-7b, 2 ranks" in out
    assert out.splitlines()[-3:] == [
        *("done: 3 steps, 1,234 tokens", "host 0: 700 bytes sent", "host 1: 900 bytes sent")
    ]
    tiny = yaml.safe_load(launches[0].recipe)
    assert (tiny["model"], tiny["max_steps"]) == ("deepseek-llm-tiny", 3)
    assert tiny["plan"][:2] == ["packed", "document_attention"]


def test_more_ranks_than_the_machine_holds_are_refused_and_nothing_is_written(
    recipe: Path,
) -> None:
    with pytest.raises(InputError, match="too many for this machine"):
        rehearsed(recipe, "--nodes", "64")
    assert list(Path().iterdir()) == [Path(recipe.name)]


@pytest.mark.long  # test_launch_scripts runs them with a stand-in for Python
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_the_scripts_to_the_end(recipe: Path) -> None:
    assert "done: 3 steps" in rehearsed(recipe)
    assert json.loads(Path("out/run/summary.json").read_text())["steps"] == 3
