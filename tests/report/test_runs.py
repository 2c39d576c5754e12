"""Runs of hasten and of other trainers: what their files say, compared fairly, hostile or not."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.errors import InputError
from hasten.report.runs import RunFacts, compare_runs, number, read_runs, render

HERE = {"cpu": "a processor", "usable_cores": 2, "memory_limit_bytes": 10**10}
RECIPE = {"model": "m", "dataset": "d.jsonl", "seed": 0, "learning_rate": 1e-3, "output": "x"}


def trained(folder: Path, name: str, **changes: Any) -> Path:
    """A folder as ``hasten train`` leaves it: 10 steps of 100 tokens, the loss falling by 0.1."""
    path = folder / name
    path.mkdir()
    lines = [{"step": i, "tokens": 100, "loss": 3 - i / 10} for i in range(1, 11)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "steps": 10,
        "tokens": 1000,
        "seconds": 5.0,
        "tokens_per_second": 250.0,
        "step_seconds_median": 0.4,
        "eval_loss": 2.2,
        "peak_memory_bytes": 5 * 10**8,
        "hardware": HERE,
        "versions": {"torch": "2.13.0"},
        "plan": [{"technique": "packed"}],
        **changes,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "recipe.yaml").write_text("recipe")
    return path


def state(folder: Path, **changes: Any) -> Path:
    """What TRL leaves: a line every 5 steps, with the tokens it saw."""
    logs = [
        {"loss": 2.9, "step": 5, "num_tokens": 500.0},
        {"eval_loss": 2.5, "step": 5},
        {"loss": 2.4, "step": 10, "num_tokens": 1000.0},
        {"train_runtime": 8.0, "train_loss": 2.6, "step": 10},
    ]
    folder.mkdir(exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 10, "log_history": logs, **changes}))
    return path


def recipe_reader(path: Path) -> dict[str, Any]:
    return dict(RECIPE)


def test_a_run_of_hasten_is_read_with_its_curve(tmp_path: Path) -> None:
    (run,) = read_runs(trained(tmp_path, "a"), recipe_reader)
    assert (run.steps, run.tokens, run.tokens_per_second) == (10, 1000, 250)
    assert list(run.curve[-1]) == [10, 1000, 2.0]
    assert run.plan == ("packed",)
    assert run.recipe == RECIPE


def test_tokens_of_trl_are_real_and_those_of_the_trainer_may_be_padding(tmp_path: Path) -> None:
    (trl,) = read_runs(state(tmp_path / "trl"))
    assert (trl.tokens, trl.tokens_per_second, trl.eval_loss) == (1000, 125, 2.5)
    logs = [{"loss": 2.4, "step": 10}, {"train_runtime": 8.0, "step": 10}]
    (plain,) = read_runs(
        state(tmp_path / "hf", log_history=logs, num_input_tokens_seen=4096).parent
    )
    assert plain.tokens is None
    assert plain.tokens_per_second is None
    assert plain.step_seconds == pytest.approx(0.8)
    assert "may count padding" in plain.notes[0]


def test_the_newest_checkpoint_of_a_trainer_s_folder_is_read(tmp_path: Path) -> None:
    for steps in (9, 10):
        state(tmp_path / f"checkpoint-{steps}", global_step=steps)
    (run,) = read_runs(tmp_path)
    assert run.steps == 10


def test_an_experiment_is_its_baseline_and_its_result(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report))
    first, last = read_runs(tmp_path)
    assert first.name.endswith(": baseline")
    assert last.name.endswith(": all techniques")
    assert last.tokens == 1e7
    report["variants"] = report["variants"][:1]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert len(read_runs(tmp_path / "report.json")) == 1


def test_losses_are_compared_at_the_tokens_that_all_have_reached(tmp_path: Path) -> None:
    a = RunFacts("a", "k", curve=np.array([(i, 100.0 * i, 3 - i / 10) for i in range(1, 21)]))
    b = RunFacts("b", "k", curve=np.array([(i, 200.0 * i, 4 - i / 10) for i in range(1, 6)]))
    found = compare_runs([a, b])
    assert found["equal"] == {"unit": "tokens", "value": 1000.0}
    assert found["runs"][0]["loss_at_equal"] == pytest.approx(2.0)  # of step 10 alone: (900, 1000]
    assert found["runs"][1]["loss_at_equal"] == pytest.approx(3.5)
    c = RunFacts("c", "k", curve=np.array([(4, np.nan, 1.0)]))
    found = compare_runs([a, c])
    assert found["equal"] == {"unit": "steps", "value": 4.0}
    assert found["runs"][1]["loss_at_equal"] == 1.0


def test_equal_runs_raise_no_warning_and_differing_ones_name_what_differs() -> None:
    one = RunFacts("a", "k", tokens=1000.0, recipe=RECIPE, hardware=HERE, plan=("x",))
    same = compare_runs([one, one])
    assert same["warnings"] == []
    assert same["differs"] == {}
    other = RunFacts(
        "b",
        "k",
        tokens=2000.0,
        recipe={**RECIPE, "dataset": "e.jsonl", "model": "n", "seed": 1, "output": "y"},
        hardware={**HERE, "usable_cores": 8},
        plan=("x", "y"),
    )
    found = compare_runs([one, other])
    assert set(found["differs"]) == {"dataset", "model", "seed", "plan"}
    text = render(found)
    for words in (
        "the model differs (model)",
        "the data differs (dataset)",
        "the seeds differ",
        "the tokens differ (1,000 to 2,000)",
        "the machine differs (usable_cores)",
    ):
        assert f"not fair: {words}" in text


def test_what_only_one_file_says_of_its_machine_is_no_difference() -> None:
    trained_run = RunFacts("a", "hasten train", tokens=1.0, recipe=RECIPE, hardware=HERE)
    variant = RunFacts(
        "b", "hasten speedup", tokens=1.0, recipe=RECIPE, hardware={**HERE, "device": "cpu"}
    )
    assert compare_runs([trained_run, variant])["warnings"] == []
    assert "the machine differs (device)" in render(
        compare_runs([variant, replace(variant, hardware={**HERE, "device": "cuda:0"})])
    )


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    runs = [*read_runs(trained(tmp_path, "ours"), recipe_reader), *read_runs(state(tmp_path / "b"))]
    text = render(compare_runs(runs))
    assert "not fair: model and data can't be checked: not known of b" in text
    assert "not measured" in text  # its memory
    assert "evaluations and saving included" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.json", "[1]"),
        ("report.json", "{}"),
        ("report.json", '{"variants": [1]}'),
        ("report.json", '{"variants": {}}'),
        ("report.json", "{" * 100_000),
        ("report.json", "[" * 100_000),
        ("summary.json", "\x00"),
        ("trainer_state.json", '{"log_history": 3}'),
        ("trainer_state.json", "null"),
        ("metrics.jsonl", "1\n2\n"),
        ("metrics.jsonl", "{}\nbroken\n{}\n"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        read_runs(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_nothing_there_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        read_runs(tmp_path)
    with pytest.raises(InputError, match="holds no run"):
        read_runs(tmp_path / "nothing")


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 5, "loss": 2.0}\n{"ste')
    (run,) = read_runs(tmp_path)
    assert run.steps == 1
    assert run.tokens == 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KEYS = ("steps", "tokens", "seconds", "plan", "hardware", "versions", "eval_loss", "variants")
HF_KEYS = ("global_step", "num_input_tokens_seen", "log_history", "best_metric")


@given(
    st.sampled_from(["summary.json", "trainer_state.json", "report.json"]),
    st.dictionaries(st.sampled_from([*KEYS, *HF_KEYS]), json_values),
)
def test_whatever_the_values_are_runs_are_read_or_refused(
    tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / name).write_text(json.dumps(values))
    try:
        found = compare_runs(read_runs(tmp_path))
    except InputError:
        return
    json.dumps(found, allow_nan=False)
    assert render(found)


@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none())
def test_only_a_finite_number_is_a_number(value: Any) -> None:
    found = number(value)
    assert found is None or found == float(value)
    assert number(True) is None
    assert number(10**400) is None


def test_names_cannot_forge_lines_or_hide(tmp_path: Path) -> None:
    run = RunFacts("a\nb\u202e", "k", tokens=1.0)
    text = render(compare_runs([run, run]))
    assert "[U+202E]" in text
    assert "a b" in text


def test_memory_of_a_long_run_is_its_curve_and_not_its_lines(tmp_path: Path) -> None:
    line = json.dumps({"loss": 1.5, "tokens": 10, "step_seconds": 0.5, "words": "x" * 400})
    steps = 20_000
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {step}, {line[1:]}\n' for step in range(1, steps + 1))
    tracemalloc.start()
    try:
        (run,) = read_runs(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (run.steps, run.tokens, run.tokens_per_second) == (steps, 10.0 * steps, 20.0)
    assert (len(run.curve), *run.curve[-1]) == (steps, steps, 10.0 * steps, 1.5)
    assert peak < 100 * steps, "four numbers for each step, and room to grow"


def test_a_pipe_in_the_place_of_a_run_s_lines_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert len(read_runs(tmp_path)[0].curve) == 0
