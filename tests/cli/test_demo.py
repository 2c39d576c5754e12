"""The demo, shortened: all of its parts, few of its steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hasten.cli.demo as module
from hasten.evidence.ablation import Design
from hasten.recipe.schema import Recipe


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute, several on a busy machine
def test_the_demo_compares_trains_and_leaves_an_honest_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DESIGN", Design(rounds=2, steps=1, warmup=1, evaluations=1))
    monkeypatch.setattr(module, "TRAINING_STEPS", 2)
    monkeypatch.setattr(module, "PLAN", ["packed"])
    whole = module.recipe_for
    fewer = {"max_records": 300, "held_out": 8.0, "vocabulary": 800, "global_batch_size": 8}

    def recipe_for(output: Path, gpu_bytes: float) -> Recipe:
        return whole(output, gpu_bytes).model_copy(update=fewer)

    monkeypatch.setattr(module, "recipe_for", recipe_for)
    module.demo(tmp_path)
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [arm["name"] for arm in report["arms"]] == ["baseline", "+ packed"]
    for arm in report["arms"]:
        assert set(arm["tokens_per_second"]) == set(arm["ratio"]) == {"median", "low", "high"}
        assert arm["tokens_per_second"]["median"] > 0
        assert arm["peak_memory_bytes"] > 0
        assert arm["held_out_loss"] == pytest.approx(report["arms"][0]["held_out_loss"], rel=1e-4)
        assert len(arm["rounds"]) == 2
        assert all(proof["acted"] for proof in arm["acted"])
    assert report["arms"][0]["padding_share"] > 0.1
    assert report["arms"][1]["padding_share"] == 0
    assert report["quality"]["verdict"] == "not worse"
    assert {"hardware", "versions", "recipe"} <= set(report)
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 500_000
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "| baseline" in out
    assert "it writes:" in out
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("gpu_bytes", "model"),
    [(0, "deepseek-llm-tiny"), (24e9, "deepseek-llm-small"), (80e9, "deepseek-llm-1b")],
)
def test_the_model_follows_the_machine(tmp_path: Path, gpu_bytes: float, model: str) -> None:
    assert module.recipe_for(tmp_path, gpu_bytes).model == model


def test_a_training_that_was_asked_to_leave_is_told_without_what_it_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = {"steps": 3, "held_out_loss": None, "tokens_per_second": None, "saved": "run/model"}
    module._show_training({**left, "samples": []})
    assert capsys.readouterr().out == "\nafter 3 steps with the whole plan: saved in run/model\n"
