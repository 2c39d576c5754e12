"""Files that an earlier version stored are read, and mean what they meant.

tests/contract/make_golden.py made them with the version of 2026-11-24, before modules had moved.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.cli.report import report
from hasten.cli.train import measured_to_hurt
from hasten.core.plan import Plan
from hasten.data.token_store import TokenStore
from hasten.measure.ablation import Design
from hasten.measure.record import ExperimentRecord
from hasten.measure.rounds import variants_of
from hasten.monitor.run import Run, run_numbers
from hasten.parts.checkpoint import checkpoints, load, verify
from hasten.recipe.schema import Recipe, load_recipe
from hasten.report.bundle import read_bundle
from hasten.report.page import render_markdown
from hasten.report.runs import read_object, read_runs
from hasten.report.schema import read_report
from hasten.training.auto_adjust import sentence
from hasten.training.run import train
from ranks import on_ranks

GOLDEN = Path(__file__).with_name("golden")
RUN = GOLDEN / "run"
STEPS = 4


def lines(name: str, run: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / run / name).read_text().splitlines()]


def test_a_resolved_recipe_is_the_recipe_that_was_written() -> None:
    given, resolved = load_recipe(GOLDEN / "recipe.yaml"), load_recipe(RUN / "recipe.yaml")
    assert resolved == given
    assert [next(iter(entry)) for entry in resolved.plan if isinstance(entry, dict)]


def test_a_finished_run_is_shown_with_its_last_numbers() -> None:
    last = lines("metrics.jsonl")[-1]
    run = Run("golden", RUN)
    run.look()
    found = run_numbers(run, now=time.time())
    assert (found["status"], found["step"], found["loss"]) == ("done", STEPS, last["loss"])
    [facts] = read_runs(RUN)
    assert (facts.steps, facts.eval_loss) == (
        STEPS,
        lines("evaluations.jsonl")[-1]["eval_loss"],
    )
    assert facts.plan == ("packed", "checkpoints")


def test_a_checkpoint_is_whole_and_holds_the_state_of_its_step() -> None:
    newest = checkpoints(RUN / "checkpoints")[-1]
    assert verify(newest, thorough=True)["step"] == STEPS
    tensors, meta = load(newest)[:2]
    assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())
    assert "job" in meta


def test_an_old_run_goes_on_from_its_checkpoint_to_the_losses_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(GOLDEN, tmp_path / "golden"))
    halfway = "run/checkpoints/step-00000002"
    train(load_recipe(Path("recipe.yaml"), [f"resume={halfway}"]), tell=lambda text: None)
    went_on = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    before = lines("metrics.jsonl")[2:]
    for name in ("step", "tokens", "examples"):
        assert [line[name] for line in went_on] == [line[name] for line in before]
    for name in ("loss", "grad_norm"):  # another processor sums in another order
        expected = [line[name] for line in before]
        assert [line[name] for line in went_on] == pytest.approx(expected, rel=1e-4)


def test_prepared_data_holds_the_tokens_of_the_records() -> None:
    index = json.loads((RUN / "data" / "index.json").read_text())
    store = TokenStore(RUN / "data" / index["train"])
    assert len(store) == len((GOLDEN / "records.jsonl").read_text().splitlines())
    example = store[0]
    assert len(example.input_ids) == len(example.trained)
    assert example.trained.any()


def test_a_record_gives_the_figures_of_its_report() -> None:
    key = json.loads((GOLDEN / "record.jsonl").read_text().splitlines()[0])["key"]
    with ExperimentRecord(GOLDEN / "record.jsonl", key) as example:
        assert example.done
        report = read_report(read_object(GOLDEN / "report.json"))
        design = Design(rounds=3, steps=2, warmup=1)
        plans = {"baseline": Plan(), "plan": Plan()}
        variants = {
            variant.name: variant for variant in variants_of(example.events, plans, {}, design)
        }
    for row in report["variants"]:
        if row["tokens_per_second"]["median"] is not None:
            assert row["rounds"] == pytest.approx(variants[row["name"]].rounds)
    assert "| plan " in render_markdown(report)


def test_a_stored_report_is_printed_alike_in_each_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(GOLDEN / "report_cumulative.json", tmp_path / "report.json")
    report([tmp_path])
    assert "| hurt " in capsys.readouterr().out
    shutil.copy(GOLDEN / "report_cumulative.json", tmp_path / "report.json")
    report([tmp_path], as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert [variant["verdict"] for variant in printed["variants"]][:2] == ["baseline", "helped"]
    assert printed == read_object(tmp_path / "report.json")


def test_a_training_after_it_says_which_rows_hurt(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "report_cumulative.json", tmp_path / "report.json")
    plan = read_object(GOLDEN / "report_cumulative.json")["recipe"]["plan"]
    recipe = Recipe(model="m", dataset="d", max_steps=1, output=str(tmp_path), plan=plan)
    slower, worse = measured_to_hurt(recipe)
    assert slower.startswith("bf16_master_weights (0.47× [0.45, 0.49] of + fused_layers; hurt")
    assert worse.startswith("fused_adamw (1.02× ")
    assert "worse: eval loss 2.5000 → 2.6000" in worse
    assert measured_to_hurt(recipe.model_copy(update={"plan": plan[:3]})) == []


def test_a_bundle_has_its_reports_rounds() -> None:
    report = read_report(read_object(GOLDEN / "report.json"))
    bundle = read_bundle(GOLDEN / "bundle.json")
    for row in report["variants"]:
        assert list(bundle.measured[row["name"]].rounds) == row["rounds"]


def test_a_study_has_its_space_and_its_end() -> None:
    study = read_object(GOLDEN / "study.json")
    assert study["schema"] == 1
    assert {"COLLATE", "FEED"} <= {row["name"] for row in study["space"]}
    assert study["ended"]


def test_a_watched_run_shows_its_machine_and_what_was_tried() -> None:
    run = Run("watched", GOLDEN / "watched")
    run.look()
    machine = lines("machine.jsonl", "watched")
    assert len(run.machine) == len(machine) > 1
    [tried] = lines("adjustments.jsonl", "watched")
    assert sentence(tried).startswith("step 127: labelled_token_loss.chunk 16384 in place of 8192")
    assert not run.events.newest()  # what was taken back isn't shown


@pytest.mark.slow
def test_a_wire_goes_on_from_what_an_old_host_s_checkpoint_says_of_it(tmp_path: Path) -> None:
    first, second = on_ranks("contract.communication_state_jobs:taken", tmp_path)
    assert first["same"]
    assert first["left"] > 0
    assert first["losses"] == second["losses"]
