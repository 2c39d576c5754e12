"""The demo, shortened: all of its parts, few of its steps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hasten.cli.demo as module
from hasten.errors import InputError
from hasten.evidence.ablation import Design
from hasten.evidence.report_gains import slower_than_above
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
    out, told = capsys.readouterr()
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
    assert "measures for 5 min and trains for 2 min at most" in out
    assert "fastest row of equal quality" in told or "none was measured to be faster" in told
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
    module._show_training({**left, "samples": []}, "+ packed")
    assert capsys.readouterr().out == "\nafter 3 steps with + packed: saved in run/model\n"


def arm(name: str, low: float, verdict: str = "held", techniques: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "verdict": verdict,
        "ratio": {"median": low + 0.1, "low": low, "high": low + 0.2},
        "techniques": techniques.split(),
        "step_seconds": {"p50": 2.0},
    }


def test_the_fastest_row_of_equal_quality_is_trained_and_not_the_last() -> None:
    base = arm("baseline", 1.0, "baseline")
    rows = [base, arm("+ a", 1.5), arm("+ b", 3.0, "harmed: worse"), arm("+ c", 0.6)]
    assert module.fastest_row(rows)["name"] == "+ a"
    assert module.fastest_row([base, arm("+ c", 0.6), arm("+ d", 0.8)])["name"] == "baseline"
    assert module.fastest_row([base])["name"] == "baseline"


def test_it_trains_as_many_steps_as_fit_into_two_minutes(tmp_path: Path) -> None:
    recipe = module.recipe_for(tmp_path, 0)
    chosen = arm("+ packed", 1.5, techniques="document_attention packed")
    found = module.trained_as(recipe, chosen)
    assert found == {"plan": ["packed", "document_attention"], "max_steps": 45}  # 2 s each
    quick = {**chosen, "step_seconds": {"p50": 0.01}}
    assert module.trained_as(recipe, quick)["max_steps"] == module.TRAINING_STEPS
    assert module.trained_as(recipe, None) == {"plan": [], "max_steps": module.FEWEST_STEPS}


def test_a_machine_that_is_too_slow_to_compare_trains_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def ablate(*given: Any, design: Design, **named: Any) -> dict[str, Any]:
        assert design.budget_seconds is not None
        assert design.budget_seconds <= module.MEASURING_SECONDS - module.SPARE_SECONDS - 100
        raise InputError("budget: 170 s is too short: two rounds take about 20 min")

    monkeypatch.setattr(module, "ablate", ablate)
    display = SimpleNamespace(tell=told.append)
    recipe = module.recipe_for(tmp_path, 0)
    began = time.monotonic() - 100  # preparing the data is part of the time
    assert module._measured(recipe, "ladder", cast(Any, display), began) is None
    assert "too short" in told[0]


def test_a_row_that_is_slower_than_the_one_above_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, techniques: list[str], rounds: list[float]) -> dict[str, Any]:
        kind = "ladder" if techniques else "baseline"
        return {
            "name": name,
            "kind": kind,
            "techniques": techniques,
            "verdict": "held",
            "rounds": rounds,
            "beside": [],
            "ratio": {"median": None},
            "luck": None,
        }

    arms = [row("baseline", [], [100, 101, 99]), row("+ a", ["a"], [200, 202, 198])]
    arms += [row("+ b", ["a", "b"], [150, 151, 149]), row("+ c", ["a", "b", "c"], [150, 152, 149])]
    assert slower_than_above(arms) == {"+ b"}
    table = "| arm | x |\n| --- | - |\n| + a | 1 |\n| + b | 2 |\n"
    module.print_with_red(table, {"+ b"})
    assert capsys.readouterr().out == table  # no terminal, no colours
