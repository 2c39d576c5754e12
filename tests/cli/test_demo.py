"""The demo: all of its parts shortened; what it chooses and prints on made-up machines."""

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
from hasten.cli.demo import row_to_train
from hasten.cli.speedup import print_table
from hasten.core.plan import Plan, name_of
from hasten.errors import InputError
from hasten.machine.gain import Gain
from hasten.machine.host import Accelerator
from hasten.measure.ablation import Variant, plans_of
from hasten.measure.experiment import Measured
from hasten.measure.recipe_experiment import ExperimentSubject
from hasten.measure.workers import WorkerPool
from hasten.progress import Display
from hasten.recipe.schema import Recipe
from hasten.recipe.shorthands import catalogue
from hasten.report.build import report_of
from hasten.report.conclusions import lead_of
from hasten.report.page import render_markdown
from hasten.report.schema import read_report
from hasten.techniques import precision
from tiny import job_context, language_job

FEWER = {"max_examples": 60, "eval_data": 4.0, "vocabulary": 400, "global_batch_size": 4}
FEWER |= {"cutoff_len": 256}
PLAN = list(module.TECHNIQUES)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few examples, two techniques, two steps."""
    whole = module.recipe_for

    def recipe_for(output: Path, gpu_bytes: float) -> Recipe:
        return whole(output, gpu_bytes).model_copy(update=FEWER)

    monkeypatch.setattr(module, "recipe_for", recipe_for)
    monkeypatch.setattr(module, "TECHNIQUES", ("packed", "document_attention"))
    monkeypatch.setattr(module, "TRAINING_STEPS", 2)
    monkeypatch.setattr(module, "DESIGN", replace(module.DESIGN, rounds=2, steps=1))
    for name in ("MEASURED_BY", "VERIFIED_BY", "TRAINED_BY"):  # on a busy machine as well
        monkeypatch.setattr(module, name, 10 * getattr(module, name))
    budget = replace(module.DESIGN, budget_seconds=10 * module.MEASURED_BY)
    monkeypatch.setattr(module, "DESIGN", budget)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute, several on a busy machine
def test_the_demo_measures_verifies_trains_and_says_one_figure(
    tmp_path: Path,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "TECHNIQUES", ("packed",))
    module.demo(tmp_path)
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [a["name"] for a in report["variants"]] == ["baseline", "+ packed"]
    for variant in report["variants"]:
        assert len(variant["rounds"]) == 2
        assert variant["eval_loss"] == pytest.approx(report["variants"][0]["eval_loss"], rel=1e-4)
        assert all(proof["effective"] for proof in variant["effective"])
        assert not verdict_is_missing(variant)
    assert report["variants"][0]["padding_share"] > 0.1
    assert report["variants"][1]["padding_share"] == 0
    assert [(row["technique"], row["verdict"]) for row in report["verification"]] == [
        ("packed", "equal")
    ]
    assert "verification on this job: 1 of 1 techniques equal their reference (" in out
    last = out.splitlines()[-1]
    assert last.startswith("chosen: ")
    table = next(line for line in out.splitlines() if line.startswith("| + packed"))
    for figure in re.findall(r"\d\.\d\d× \[.*?\]", last)[:1]:
        assert figure in out.split("measured: ")[0]
    assert table.count("|") == 8
    summary = json.loads((tmp_path / "summary.json").read_text())
    chosen = report["fastest"]
    rows = [variant["name"] for variant in report["variants"]]
    trained = [entry["technique"] for entry in summary["plan"]]
    assert trained == PLAN[: rows.index(chosen)]
    assert f"training with {chosen}: 2 steps" in out
    assert " -m hasten init MODEL DATA" in out
    assert str(tmp_path / "report.html") in out
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 500_000
    assert "https://" not in page
    assert (tmp_path / "model" / "model.safetensors").is_file()


def verdict_is_missing(variant: dict[str, Any]) -> bool:
    return variant["verdict"].partition(":")[0] not in (
        *("baseline", "helped", "hurt", "no effect", "undecided"),
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_on_a_machine_too_busy_to_measure_one_sentence_says_so_and_the_choice_trains(
    tmp_path: Path,
    short: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hasten.measure.recipe_experiment.measured", nothing_measured)
    module.demo(tmp_path)
    out = capsys.readouterr().out
    (sentence,) = [
        line for line in out.splitlines() if line.startswith("nothing could be measured")
    ]
    assert "two rounds of the baseline and the whole plan take about 9 min more" in sentence
    assert "| baseline" not in out
    assert not (tmp_path / "report.html").exists()
    assert out.splitlines()[-1] == "chosen: all techniques, since nothing could be measured"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["technique"] for entry in summary["plan"]] == ["packed", "document_attention"]


def nothing_measured(subject: ExperimentSubject, plans: Any, *rest: Any, **more: Any) -> Measured:
    text = "two rounds of the baseline and the whole plan take about 9 min more"
    return Measured([Variant("baseline", Plan(), kind="baseline")], {"dropped": [text]})


@pytest.mark.parametrize(
    ("gpu_bytes", "model"),
    [(0, "deepseek-llm-tiny"), (24e9, "deepseek-llm-small"), (80e9, "deepseek-llm-1b")],
)
def test_the_model_follows_the_machine(tmp_path: Path, gpu_bytes: float, model: str) -> None:
    assert module.recipe_for(tmp_path, gpu_bytes).model == model


# Which techniques, and with how many threads.


def subject_on(tmp_path: Path, sets: tuple[str, ...], gpu: bool = False) -> ExperimentSubject:
    context = job_context(language_job())
    gpus = (Accelerator("H100", int(80e9), "9.0"),) if gpu else ()
    hardware = replace(
        context.hardware, instruction_sets=sets, system="Linux 6.1", accelerators=gpus
    )
    context = replace(context, hardware=hardware, device="cuda:0" if gpu else "cpu")
    return ExperimentSubject(module.recipe_for(tmp_path, 0), context, Plan(), "key")


def test_each_row_has_one_technique_more_that_the_processor_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Gain(0.1, 0.09, 0.11, 6), Gain(1.1, 0.9, 1.2, 6)
    for sets, gain in (((), slow), ((), fast), (("avx512f",), fast), (("amx_bf16",), fast)):
        monkeypatch.setattr(precision, "bf16_gain", lambda device, gain=gain: gain)
        told: list[str] = []
        subject = module.with_usable_techniques(subject_on(tmp_path, sets), told.append)
        plans, _ = plans_of(subject.plan, "cumulative")
        counts = [len(plan) for plan in plans.values()]
        assert counts == list(range(7 if gain is fast else 6)), subject.plan
        assert Plan.from_list(subject.recipe.plan, catalogue()) == subject.plan
        assert all(not t.unsupported_reasons(subject.context) for t in subject.plan)
        assert ("bf16_master_weights" in map(name_of, subject.recipe.plan)) == (gain is fast)
        assert told if gain is slow else not told
        assert all(text.startswith("bf16_master_weights can't work here") for text in told)


# The choice, on reports of made-up machines.


def report_on(speeds: dict[str, float], rounds: int = 4, step: float = 0.2) -> dict[str, Any]:
    """A cumulative of the demo's plan, of which these rows were measured."""
    variants = []
    for number, name in enumerate(["baseline", *(f"+ {n}" for n in PLAN)]):
        if name in speeds:
            plan = Plan.from_list(PLAN[:number], catalogue())
            kind: Any = "cumulative" if 0 < number < len(PLAN) else "all" if number else "baseline"
            found = Variant(name, plan, kind=kind)
            jitter = [1 + 0.001 * (-1) ** turn * number for turn in range(rounds)]
            found.rounds = [1000 * speeds[name] * share for share in jitter]
            one = {"positions": 9, "tokens": 9}
            found.steps = [{"step_seconds": s, **one} for s in (step, step, step)]
            found.eval_data = [(9, 2.0)]
            variants.append(found)
    recipe = {"seed": 0, "plan": PLAN}
    return report_of(variants, title="t", command="c", hardware={}, versions={}, recipe=recipe)


SPEEDS = {"baseline": 1.0, "+ packed": 1.2, "+ document_attention": 2.4, "+ fused_layers": 2.38}
SPEEDS |= {"+ labelled_token_loss": 3.0, "+ bf16_master_weights": 6.0, "+ fused_adamw": 6.0}


def test_the_choice_is_a_row_of_the_table_with_the_table_s_figure() -> None:
    report = report_on(SPEEDS)
    row, sentence = row_to_train(report)
    assert row is not None
    assert row["name"] == "+ bf16_master_weights"  # the last one adds nothing
    assert row["entries"] == PLAN[:5]
    cell = next(
        line.split("|")[4].strip()
        for line in render_markdown(report).splitlines()
        if line.startswith(f"| {row['name']} ")
    )
    assert re.fullmatch(r"6\.\d\d× \[.*\]", cell)
    assert sentence == (
        "chosen: packed, document_attention, fused_layers, labelled_token_loss, "
        f"bf16_master_weights (row '+ bf16_master_weights'): {cell} the baseline's speed "
        "at equal quality"
    )
    assert lead_of(read_report(report))["name"] == row["name"]  # and so has the page
    assert report["fastest"] == row["name"]


def test_where_no_row_is_faster_the_choice_has_no_technique() -> None:
    slow = {name: 1 - 0.05 * place for place, name in enumerate(SPEEDS)}
    row, sentence = row_to_train(report_on(slow))
    assert row is not None
    assert (row["entries"], row["name"]) == ([], "baseline")
    assert sentence == "chosen: no technique: no row is faster at equal quality"


def test_a_single_round_is_said_to_prove_nothing() -> None:
    row, sentence = row_to_train(report_on(SPEEDS, rounds=1))
    assert row is not None
    assert row["name"] in ("+ bf16_master_weights", "+ fused_adamw")
    end = r"6\.0\d× the baseline's speed at equal quality, in a single round, which proves nothing"
    assert re.search(f"{end}$", sentence)


def test_without_a_quality_the_choice_says_so() -> None:
    report = report_on(SPEEDS)
    for variant in report["variants"]:
        variant["eval_loss"], variant["quality"] = None, variant["quality"] and "undecided"
    row, sentence = row_to_train(report)
    assert row is None
    assert sentence.endswith("there was no time to compare quality")


@pytest.mark.parametrize(("step", "steps"), [(0.01, 160), (1.0, 46), (500.0, 1), (None, 160)])
def test_the_training_has_as_many_steps_as_fit_into_its_time(
    step: float | None, steps: int
) -> None:
    assert module.fitting_steps(60.0, step) == steps


# The training and what is printed.


def test_a_training_is_asked_to_stop_once_its_time_has_come_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = SimpleNamespace(preempted=False, stop_requested=False)
    line: Any = SimpleNamespace(session=session, start=None, step=lambda metrics: None)
    now, requested = iter((0.0, 1.0, 71.9, 72.0)), []

    def train(recipe: Recipe, on_step: Any, **more: Any) -> dict[str, Any]:
        for _ in range(3):
            on_step(None)
            requested.append(session.stop_requested)
        return {}

    monkeypatch.setattr("hasten.cli.train.StepLine", lambda *given: line)
    monkeypatch.setattr("hasten.training.run.train", train)
    monkeypatch.setattr(module, "_spent_seconds", lambda: module.TRAINED_BY - 72)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    module._trained(subject_on(tmp_path, ()), None, Display())
    assert requested == [False, False, True]
    assert session.stop_reason == "time limit"
    assert not session.preempted  # its loss and its sample are still wanted


SUMMARY: dict[str, Any] = {
    "name": "+ packed",
    "steps": 56,
    "planned_steps": 91,
    "stopped": "time limit",
    "tokens": 190_000,
    "eval_loss": 5.1234,
    "tokens_per_second": 2523.0,
    "saved": "run/model",
    "samples": [{"prompt": "def f():", "answer": "\n".join("self" for _ in range(30))}],
}


def test_a_training_says_that_its_time_was_over_and_what_text_to_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module._show_training(SUMMARY, subject_on(tmp_path, ()))
    first, _, expected, *sample = capsys.readouterr().out.strip().splitlines()
    assert first == (
        "training with + packed: 56 steps of 91 (its time was over), 190,000 tokens, "
        "eval loss 5.1234, 2,523 tokens/s, saved in run/model"
    )
    assert "after 190,000 tokens from random weights" in expected
    assert "its text shows at best how Python looks" in expected
    assert sample[-1] == "  ... 18 more lines"


def test_a_training_without_samples_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {"stopped": "done", "eval_loss": None, "tokens_per_second": None}
    module._show_training({**SUMMARY, **done, "samples": []}, subject_on(tmp_path, ()))
    assert capsys.readouterr().out == (
        "\ntraining with + packed: 56 steps, 190,000 tokens, saved in run/model\n"
    )


def test_the_verification_has_a_result() -> None:
    how = "(gradients in float64, updates of the weights, or losses bit by bit)"
    rows: list[dict[str, Any]] = [
        {"technique": name, "verdict": "equal", "text": ""} for name in ("a", "b")
    ]
    findings: Any = {"verification": rows, "invariance": []}
    assert module.verification_lines(findings) == [
        f"verification on this job: 2 of 2 techniques equal their reference {how}"
    ]
    rows += [{"technique": "c", "verdict": "differs", "text": "gradient off by 0.3"}]
    rows += [{"technique": "d", "verdict": "not tested", "text": ""}]
    line, fault = module.verification_lines(findings)
    assert line == (
        f"verification on this job: 2 of 4 techniques equal their reference {how}; no time for d"
    )
    assert fault.startswith("FAIL ")
    assert "gradient off by 0.3" in fault


def test_a_measurement_that_waits_too_long_for_another_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*arguments: Any, **options: Any) -> Any:
        raise InputError("budget: waiting for pid 7 took all of it; start again")

    monkeypatch.setattr("hasten.measure.recipe_experiment.measured", busy)
    subject = replace(subject_on(tmp_path, ()), plan=Plan.from_list(["packed"], catalogue()))
    with WorkerPool(tmp_path) as pool:
        outcome = module._measured(subject, pool, Display())
    assert outcome == (None, "budget: waiting for pid 7 took all of it; start again")


def test_a_row_that_is_slower_than_the_row_above_it_is_red_on_a_terminal() -> None:
    report = report_on({**SPEEDS, "+ fused_layers": 2.0})
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
    print_table(report, screen)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    red = [line.split("|")[1].strip() for line in lines if line.startswith("\x1b[31m")]
    assert red == ["+ fused_layers"]
    plain = Console(file=io.StringIO(), width=40)
    print_table(report, plain)
    assert plain.file.getvalue() == render_markdown(report) + "\n"  # type: ignore[attr-defined]
