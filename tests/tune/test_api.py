"""Tuning as a user calls it: what is refused, and what a process that is killed leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.errors import InputError
from hasten.machine.files import write_atomic
from hasten.recipe.schema import recipe_from
from hasten.tune.api import TuneOptions, tune
from hasten.tune.report import best_row
from hasten.tune.study import Study
from sample_data import small

OWN = {"max_steps": 10, "global_batch_size": 4, "plan": [], "on_obstacle": "skip"}
# A tuning that stands still as soon as three trials are over and noted.
THREE_TRIALS = """
import sys, time
from pathlib import Path
from hasten.progress import SilentProgress
from hasten.tune.api import TuneOptions, tune

class StandsStill(SilentProgress):
    def show(self, text, share):
        if text.startswith("trials 4"):
            print("three trials", flush=True)
            time.sleep(600)

options = TuneOptions(trials=4, steps=1, only=("gradient_accumulation",))
tune(Path(sys.argv[1]), 600, options, audience=StandsStill())
"""


@pytest.mark.long  # a study that was killed goes on in test_study
def test_a_process_that_is_killed_leaves_its_trials_and_the_best_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, recipe = tmp_path / "three_trials.py", tmp_path / "recipe.yaml"
    program.write_text(THREE_TRIALS)
    recipe.write_text(recipe_from(small(tmp_path, **OWN), "test").to_yaml())
    command = [sys.executable, str(program), str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"three trials\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    (record,) = tmp_path.glob("run/studies/*/record.jsonl")
    assert record.read_text().count('"event": "trial"') == 3

    monkeypatch.setattr(Study, "leaders", lambda study, count=0: [])  # no final comparison
    options = TuneOptions(trials=4, steps=1, only=("gradient_accumulation",))
    found = tune(recipe, 600, options)
    assert found.folder == record.parent
    assert len(found.report["trials"]) == 4
    places = [json.dumps(t["settings"]) for t in found.report["trials"]]
    assert len(set(places)) == 4


@pytest.mark.parametrize(
    ("budget", "options", "said"),
    [
        ("soon", {}, "budget: can't read 'soon'"),
        (0, {}, "a time"),
        (-5.0, {}, "budget: can't read"),
        ("60s", {"sampler": "tpee"}, "did you mean 'tpe'"),
        ("60s", {"objective": "speed"}, "objective: there is no 'speed'"),
        ("60s", {"objective": "money"}, "there is no 'money'; there are tokens, memory"),
    ],
)
def test_bad_input_is_a_sentence(
    budget: str | float, options: dict, said: str, tmp_path: Path
) -> None:
    job = recipe_from(small(tmp_path, **OWN), "test")
    with pytest.raises(InputError, match=said):
        tune(job, budget, TuneOptions(**options))


def test_a_recipe_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"nothing\.yaml"):
        tune("nothing.yaml")


def test_for_less_memory_a_slower_variant_may_win_and_a_worse_model_may_not() -> None:
    def row(name: str, verdict: str, peak: int, quality: str | None = "not worse") -> dict:
        return {"name": name, "verdict": verdict, "quality": quality, "peak_memory_bytes": peak}

    rows = [
        row("baseline", "baseline", 100, None),
        row("baseline again", "baseline: a second copy, for the noise", 10, None),
        row("choice 1", "helped", 50, "worse: eval loss 2.0000 → 2.1000"),
        row("choice 2", "failed: killed", 50, None),
        {**row("choice 3", "helped", 50), "refused": "lossy: nobody was asked to prove it"},
        row("choice 4", "hurt: activation_checkpointing did not act", 70),
        row("choice 5", "hurt", 80),
    ]
    found = best_row(rows, "memory", None)
    assert found is not None
    assert found["name"] == "choice 4"


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.yaml"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["best.yaml"]
