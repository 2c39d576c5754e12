"""Files that an earlier version stored are read, and mean what they meant.

tests/contract/make_golden.py made them with the version of 2026-11-24, before modules had moved.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contract.make_recorded import EXPERIMENTS, numbers
from hasten.cli.report import report
from hasten.cli.train import measured_to_hurt
from hasten.core.plan import Plan
from hasten.core.setup import Session
from hasten.core.step import training
from hasten.data.token_store import TokenStore
from hasten.integrations.checkpoints import keep_communication, take_communication
from hasten.machine.environment import World
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
from hasten.techniques.communication.compress import TopK
from hasten.techniques.layout.ddp import DDP
from hasten.training.auto_adjust import sentence
from hasten.training.run import train
from ranks import on_ranks
from tiny import VOCABULARY, examples, language_job, session_of
from told import json_lines

HOST = Path(__file__).with_name("golden") / "host"
HOST_STEPS = 3


def small_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def session(world: World) -> Session:
    job = language_job(small_model, data=examples(16), steps=8)
    return session_of(job, DDP(), TopK(0.1, dense_share=0.0, minimum=1), world=world)


def made(world: World) -> Any:
    """Train some steps and keep what the communication method has left out."""
    found = session(world)
    list(itertools.islice(training(found), HOST_STEPS))
    HOST.mkdir(parents=True, exist_ok=True)
    keep_communication(found.setup, HOST)


def taken(world: World) -> Any:
    """What a communication method has that goes on from the stored state, and how it was when it
    was stored.
    """
    found = session(world)
    take_communication(found.setup, HOST)
    communication: Any = found.setup.communication
    state = plain(communication.state_dict())
    losses = [metrics.loss for metrics in itertools.islice(training(found), 1)]
    stored = plain(torch.load(HOST / "hasten_communication.pt", weights_only=True))
    return {"same": state == stored[world.rank], "left": total(stored), "losses": losses}


def plain(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def total(value: Any) -> float:
    """The sum of the sizes of all its fractions."""
    if isinstance(value, dict):
        return sum(map(total, value.values()))
    if isinstance(value, list):
        return sum(map(total, value))
    return abs(value) if isinstance(value, float) else 0.0


GOLDEN = Path(__file__).with_name("golden")
RUN = GOLDEN / "run"
STEPS = 4


def lines(name: str, run: str = "run") -> list[dict[str, Any]]:
    return json_lines(GOLDEN / run / name)


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
    went_on = json_lines(Path("run/metrics.jsonl"))
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
    first, second = on_ranks(taken, tmp_path)
    assert first["same"]
    assert first["left"] > 0
    assert first["losses"] == second["losses"]


RECORDED = sorted(Path(__file__).with_name("recorded").glob("*.json"))


def test_there_is_a_record_of_each_experiment() -> None:
    assert len(RECORDED) == len(EXPERIMENTS) == 19


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_record_gives_the_numbers_that_it_gave(path: Path) -> None:
    kept: dict[str, Any] = json.loads(path.read_text())
    plans = dict.fromkeys(kept["plans"], Plan())
    design = Design(**kept["design"])
    variants = variants_of(kept["events"], plans, kept["kinds"], design)
    # Quantiles of Student's t differ in the last digits between processors and libraries.
    expect_equal(numbers(variants), kept["expected"])
    assert any(row["ratio"] for row in kept["expected"]["variants"])


def expect_equal(found: Any, expected: Any, where: str = "") -> None:
    """Asserts equal values, with floats equal to 12 digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            expect_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for position, pair in enumerate(zip(found, expected, strict=True)):
            expect_equal(*pair, f"{where}/{position}")
    else:
        is_float = isinstance(expected, float)
        assert found == (
            pytest.approx(expected, rel=1e-12, nan_ok=True) if is_float else expected
        ), where
