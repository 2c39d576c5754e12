"""The demo, shortened: all of its parts, few of its steps."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import hasten.cli.demo as module
from hasten.cli.terminal import print_table
from hasten.core.plan import Plan
from hasten.measure.ablation import Arm, Design
from hasten.measure.budget import GRACE
from hasten.measure.choose import Choice
from hasten.recipe.schema import Recipe
from hasten.recipe.shorthands import catalogue
from hasten.report.findings import report_of
from hasten.report.page import render_markdown
from hasten.training.chosen_plan import PROOF_SHARE


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute, several on a busy machine
def test_the_demo_compares_trains_and_leaves_an_honest_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DESIGN", Design(rounds=2, steps=1, warmup=1, evaluations=1))
    monkeypatch.setattr(module, "TRAINING_STEPS", 2)
    monkeypatch.setattr(module, "PLAN", ["packed"])
    monkeypatch.setattr(module, "CHOOSING", 0.05)
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
    assert report["samples"][0]["arm"].endswith(", 2 steps")
    assert json.loads((tmp_path / "choice.json").read_text())["entries"]
    assert re.match(r"plan: auto chose |chosen: ", out.splitlines()[-1])  # one sentence ends it
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


def report_on(speeds: dict[str, float], step: float = 0.2) -> dict[str, Any]:
    """A ladder of the demo's plan, of which these rows were measured."""
    arms = []
    for number, name in enumerate(["baseline", *(f"+ {n}" for n in module.PLAN)]):
        if name in speeds:
            plan = Plan.from_list(module.PLAN[:number], catalogue())
            found = Arm(name, plan, kind="ladder" if number else "baseline")
            jitter = (1.0, 1 - 0.001 * number, 1 + 0.001 * number)
            found.rounds = [1000 * speeds[name] * share for share in jitter]
            one = {"slots": 9, "tokens": 9}
            found.steps = [{"step_seconds": s, **one} for s in (step, step, step)]
            found.held_out = [(9, 2.0)]
            arms.append(found)
    recipe = {"seed": 0, "plan": module.PLAN}
    return report_of(arms, title="t", command="c", hardware={}, versions={}, recipe=recipe)


SPEEDS = {"baseline": 1.0, "+ packed": 1.2, "+ labelled_token_loss": 3.0}
SPEEDS |= {"+ bf16_master_weights": 1.5, "+ fused_adamw": 1.6}


CHOICE = Choice(
    entries=["packed", "fused_layers"],
    source="measured",
    why="the fastest of 5 plans",
    gain={"median": 4.0, "low": 3.5, "high": 4.5},
    tokens_per_second=4000.0,
)


def test_the_demo_trains_with_what_was_chosen() -> None:
    chosen = module.plan_to_train(report_on(SPEEDS), module.PLAN, CHOICE)
    assert (chosen.name, chosen.plan) == ("the choice", ["packed", "fused_layers"])
    assert chosen.why == (
        "plan: auto chose packed, fused_layers: the fastest of 5 plans; "
        "4.00x [3.50, 4.50] the speed without techniques"
    )
    assert chosen.step_seconds == pytest.approx(0.2 * 1000 / 4000)  # by the baseline's step


@pytest.mark.parametrize(
    "choice",
    [
        None,
        replace(CHOICE, source="forecast", gain=None, tokens_per_second=None),
        replace(CHOICE, gain={"median": 2.5, "low": 1.0, "high": 9.0}),  # a row is surely faster
    ],
)
def test_the_demo_trains_with_its_best_row_where_it_is_surely_faster_than_the_choice(
    choice: Choice | None,
) -> None:
    row = module.plan_to_train(report_on(SPEEDS), module.PLAN, choice)
    assert row.plan == ["packed", "document_attention", "fused_layers", "labelled_token_loss"]
    assert row.why.startswith('chosen: "+ labelled_token_loss" (packed, document_attention, ')
    assert "the fastest row of equal quality: 3.00× [" in row.why


def test_the_best_row_may_be_the_whole_plan_or_the_baseline() -> None:
    faster = report_on({**SPEEDS, "+ fused_adamw": 4.0})
    assert module.plan_to_train(faster, module.PLAN, None).plan == module.PLAN
    slow = module.plan_to_train(
        report_on({"baseline": 1.0, "+ fused_adamw": 0.5}), module.PLAN, None
    )
    assert (slow.plan, slow.name) == ([], "baseline")
    assert "no row was shown to be faster" in slow.why


def test_where_nothing_was_measured_in_time_the_demo_says_so_and_trains_with_its_plan() -> None:
    report = report_on({"baseline": 1.0})
    report["arms"][0]["tokens_per_second"] = {"median": None, "low": None, "high": None}
    row = module.plan_to_train(report, module.PLAN, None)
    assert row.plan == module.PLAN
    assert "nothing could be measured in time" in row.why
    assert row.steps() == module.TRAINING_STEPS


@pytest.mark.parametrize(("step", "steps"), [(0.01, 160), (1.0, 48), (500.0, 1)])
def test_the_training_has_as_many_steps_as_fit_into_its_time(step: float, steps: int) -> None:
    assert module.plan_to_train(report_on(SPEEDS, step), module.PLAN, None).steps() == steps


def test_a_training_is_asked_to_stop_once_its_time_has_come() -> None:
    told: list[Any] = []
    session: Any = SimpleNamespace(leaving=False, stop_requested=False)
    now = iter((1.0, 71.9, 72.0, 80.0))
    stop = module.TimedStop(72.0, told.append, told.append, lambda: next(now))
    stop.start(session)
    seen = []
    for metrics in ("a", "b", "c"):
        stop.step(metrics)  # type: ignore[arg-type]
        seen.append(session.stop_requested)
    assert seen == [False, False, True]
    assert not session.leaving  # its loss and its sample are still wanted
    assert told == [session, "a", "b", "c"]


def test_measuring_ends_by_a_deadline_that_counts_from_the_beginning() -> None:
    assert module.DESIGN.partial
    assert module.DESIGN.budget_seconds * (1 + GRACE) == module.LADDER_SECONDS
    assert module.LADDER_SECONDS < module.MEASURING_SECONDS == 300
    assert module.CHOOSING * (1 + PROOF_SHARE) < 1
    assert module.TRAINING_SECONDS == 120


def test_a_row_that_is_slower_than_the_row_above_it_is_red_on_a_terminal() -> None:
    report = report_on(SPEEDS)
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
    print_table(report, screen)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    red = [line.split("|")[1].strip() for line in lines if line.startswith("\x1b[31m")]
    assert red == ["+ bf16_master_weights"]
    plain = Console(file=io.StringIO(), width=40)
    print_table(report, plain)
    assert plain.file.getvalue() == render_markdown(report) + "\n"  # type: ignore[attr-defined]
