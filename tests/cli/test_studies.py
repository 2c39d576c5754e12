"""The studies of a run in ``hasten report``: those of speed and of learning, whole or damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.report import report
from hasten.report.runs import section, studies_of

SPEED = {
    "said": "1.500× of the speed with PRECISION=autocast. 3 trials; 3 trials were done.",
    "trials": [
        {"log_rate": None, "changes": {"ACTIVATION_CHECKPOINTING": "activation_checkpointing"}},
        {"log_rate": 0.4055, "changes": {"PRECISION": "autocast"}},
        {"log_rate": 0.0, "changes": {}},
    ],
    "importance": {"PRECISION": 0.9, "ACTIVATION_CHECKPOINTING": 0.1, "LOSS": 0.0},
}
LEARNING = {
    "study": "learning",
    "said": "No significant difference: keep the values as they are. 2 trainings; done.",
    "trials": [
        {"log_rate": 0.0, "changes": {}, "loss": 3.25},
        {"log_rate": 0.01, "changes": {"learning_rate": 0.004}, "loss": 3.2176},
    ],
    "importance": {},
}


def keep(run: Path, name: str, study: Any, at: float) -> Path:
    path = run / "studies" / name / "study.json"
    path.parent.mkdir(parents=True)
    path.write_text(study if isinstance(study, str) else json.dumps(study))
    os.utime(path, (at, at))
    return path


def test_studies_are_told_newest_first_with_their_best_trials(tmp_path: Path) -> None:
    keep(tmp_path, "a", SPEED, 100)
    keep(tmp_path, "b", LEARNING, 200)
    text = section(studies_of(tmp_path))
    assert text.index("study of learning: No significant") < text.index("study of speed: 1.500×")
    assert "1.500× in its trial  PRECISION=autocast" in text
    assert text.index("PRECISION=autocast\n") < text.index("as the recipe\n  what mattered")
    assert "what mattered: PRECISION 90%, ACTIVATION_CHECKPOINTING 10%" in text
    assert "loss 3.2176  learning_rate=0.004" in text
    assert str(tmp_path / "studies" / "a" / "study.html") in text


def test_a_run_without_studies_has_no_section(tmp_path: Path) -> None:
    assert section(studies_of(tmp_path)) == ""


def test_of_many_studies_the_newest_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    for number in range(5):
        keep(tmp_path, f"{number}", {**SPEED, "said": f"number {number}"}, number)
    text = section(studies_of(tmp_path))
    assert "number 4" in text
    assert "number 1" not in text
    assert "2 older studies" in text


@pytest.mark.parametrize(
    "damaged",
    [
        "not JSON",
        "[]",
        json.dumps({"trials": [{"log_rate": "fast"}]}),
        json.dumps({"trials": 5}),
        json.dumps({"trials": [{"log_rate": 1e9, "changes": {}}]}),
        json.dumps({"trials": [{"log_rate": 1.0, "changes": []}], "importance": {"a": None}}),
    ],
)
def test_a_damaged_study_is_named_and_the_others_are_told(tmp_path: Path, damaged: str) -> None:
    keep(tmp_path, "bad", damaged, 200)
    keep(tmp_path, "good", SPEED, 100)
    text = section(studies_of(tmp_path))
    assert "PRECISION=autocast" in text
    assert "bad" in text


def test_the_report_of_a_recipe_that_was_only_tuned_is_its_studies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep(tmp_path, "a", SPEED, 100)
    report([tmp_path])
    assert capsys.readouterr().out.startswith("study of speed: 1.500×")
    report([tmp_path], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"studies": {str(path.parent): SPEED}}
